"""Interaction data: from public or own files to a cleaned, split dataset with semantic IDs.

``prepare`` does the whole stage and returns a ``Dataset``; ``load_dataset`` opens one that was prepared before;
``describe`` renders its figures. scikit-learn and polars are imported only where they work.
"""

from zoo.data.dataset import Dataset, Split, load_dataset
from zoo.data.preparing import prepare
from zoo.data.semantic_ids import SemanticIds, residual_kmeans
from zoo.data.sources import SOURCES, fetch_source
from zoo.data.summary import describe
from zoo.data.trie import Trie
from zoo.files import cache_folder

__all__ = [
    "SOURCES",
    "Dataset",
    "SemanticIds",
    "Split",
    "Trie",
    "cache_folder",
    "describe",
    "fetch_source",
    "load_dataset",
    "prepare",
    "residual_kmeans",
]
