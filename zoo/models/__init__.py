"""One file per model, each readable top to bottom; ``presets`` finds them by name."""
