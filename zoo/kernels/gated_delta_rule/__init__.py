"""The gated delta rule: a recurrent memory that forgets, and overwrites what a key pointed to before.

Per head, with the state S [K, V] from a given S_0, keys k_t and queries q_t [K], values v_t [V], log a_t <= 0 and b_t
in [0, 1]:

    S'_t = a_t S_{t-1}                              forget
    e_t  = v_t - S'_t^T k_t                         what the memory does not say yet
    S_t  = S'_t + b_t k_t e_t^T                     write it
    o_t  = scale S_t^T q_t                          read

which is S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T (Gated DeltaNet, arXiv 2412.06464, transposed).
With ``normalize``, q_t and k_t are first divided by sqrt(|x|^2 + 1e-6). Positions from a row's length on change nothing
and give o = 0; the final state is the one after the last valid position.

In chunks of C positions (the form of the kernels; i, j count from the chunk's start, S is the state before it):

    g_i  = log a_1 + ... + log a_i                  D_ij = exp(g_i - g_j) for i >= j, else 0
    T    = (I + strictly lower part of (b_i k_i.k_j D_ij))^-1
    U    = T (b_i (v_i - exp(g_i) S^T k_i))         u_i = b_i e_i: the writes
    o_i  = scale (exp(g_i) S^T q_i + sum_j D_ij (q_i.k_j) u_j)
    S    <- exp(g_C) S + sum_j D_Cj k_j u_j^T

Every exponent is a difference g_i - g_j with i >= j, so it is at most 0: no decay, however strong, overflows. A value
that is not finite reaches all outputs of its chunk, row and head, also earlier ones, where the recurrence would keep to
later ones.
"""

from zoo.kernels.gated_delta_rule.op import gated_delta_rule

__all__ = ["gated_delta_rule"]
