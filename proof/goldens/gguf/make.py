"""Goldens for ggml's blocks, made by llama.cpp's Python package.

Writes engine/kvmodel/tests/goldens/ggml_blocks.json: for each blocked element type, two rows of blocks as
hex, and the elements that gguf.quants.dequantize returns for them. Blocks are random bytes with small f16
scales.

    pip install gguf==0.19.0 numpy==2.4.6
    python proof/goldens/gguf/make.py
"""

import json
import pathlib

import gguf
import numpy as np

OUT = pathlib.Path(__file__).parents[3] / "engine/kvmodel/tests/goldens/ggml_blocks.json"
# The offsets of the f16 scales in a block.
SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
}


def main() -> None:
    rng = np.random.default_rng(7)
    goldens = {}
    for name, places in SCALES.items():
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        count = max(1, 64 // elements)
        rows = rng.integers(0, 256, (2, count, size), dtype=np.uint8)
        for place in places:
            scales = rng.uniform(-0.01, 0.01, (2, count, 1)).astype(np.float16)
            rows[:, :, place : place + 2] = scales.view(np.uint8)
        values = gguf.quants.dequantize(rows.reshape(2, count * size), kind)
        goldens[name] = {
            "shape": [2, count * elements],
            "bytes": rows.tobytes().hex(),
            # The shortest decimals that give these f32 numbers.
            "values": [float(str(x)) for x in values.astype(np.float32).ravel()],
        }
    header = f"made by proof/goldens/gguf/make.py with gguf 0.19.0 and numpy {np.__version__}"
    OUT.write_text(json.dumps({"header": header, "blocks": goldens}) + "\n")


if __name__ == "__main__":
    main()
