"""Writes quants.gguf, a tensor of random blocks of every element type that is read, and quants_expected.json, what the Python
package gguf makes of each: python make_quant_goldens.py (in this folder).

Run with gguf 0.19.0, numpy 2.4.6. Blocks are random bytes but for their scales (F16), which are finite and of every kind: zero,
subnormal, negative, large.
"""
import json
import zlib

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

Q = gguf.GGMLQuantizationType
rng = np.random.default_rng(17)
SCALES = {Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208]}
writer = gguf.GGUFWriter("quants.gguf", "llama")
expected = {}


def halves(n):
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 3, n)).astype(np.float16)
    x[rng.random(n) < 0.1] = 0
    return x.view(np.uint8).reshape(n, 2)


for kind in [Q.F32, Q.F16, Q.BF16, *SCALES]:
    block, size = GGML_QUANT_SIZES[kind]
    rows, columns = 3, 512
    if kind in SCALES:
        data = rng.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
        for at in SCALES[kind]:
            data[:, at:at + 2] = halves(len(data))
        data = data.reshape(rows, -1)
    elif kind == Q.F16:
        data = halves(rows * columns).view(np.float16).reshape(rows, columns)
    elif kind == Q.BF16:
        data = (rng.standard_normal((rows, columns)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        data = rng.standard_normal((rows, columns)).astype(np.float32)
    writer.add_tensor(kind.name, data, raw_dtype=kind)
    values = np.ascontiguousarray(dequantize(data, kind).astype(np.float32).reshape(rows, columns))
    expected[kind.name] = {"first": [float(x) for x in values[0, :4]], "crc32": zlib.crc32(values.tobytes())}
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
json.dump(expected, open("quants_expected.json", "w"), indent=0)
