"""Routes: for each output stream, which stored stream provides the keys and which the values.

The paper's retrieval rules (k_r^j, v_r^j) differ in nothing else, so they are data rather than classes.
"""

from dualres.ops import Route

SINGLE = Route(key=(0,), value=(0,))  # AttnRes: k = v
VALUE_PROJECTED = Route(key=(0,), value=(1,))  # AttnRes + VProj: states are stored as (v, W v)
DUAL = Route(key=(1, 0), value=(0, 1))  # DAR: (C^{1-j}, C^j)
SELF_KV = Route(key=(0, 1), value=(0, 1))  # DAR-SelfKV: (C^j, C^j)
FIXED_KV = Route(key=(0, 0), value=(1, 1))  # DAR-FixedKV: (C^0, C^1)
CROSS_V = Route(key=(0, 1), value=(1, 0))  # DAR-CrossV: (C^j, C^{1-j})
