"""Goldens for the 8-bit float codecs, made by PyTorch.

Writes kvcore/tests/goldens/fp8.csv: the bits of an f32, and the bytes that
torch.float8_e4m3fn and torch.float8_e5m2 give for it. PyTorch saturates only one of them. Therefore
finite inputs are clamped to the largest finite value (448 and 57344) before the conversion, as
`Fp8Kind` documents for both. Infinity is left out, because PyTorch converts it to 448 in e4m3fn, and
`Fp8Kind` to NaN. Inputs are ties between neighbouring codes with the f32 values before and after each,
values beyond the largest, subnormals, zeros, NaN, and a spread of magnitudes.

    pip install torch==2.15.0
    python proof/goldens/fp8/make.py
"""

import pathlib
import struct

import torch

OUT = pathlib.Path(__file__).parents[3] / "kvcore/tests/goldens/fp8.csv"
KINDS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def value(b: int) -> float:
    return struct.unpack("<f", struct.pack("<I", b))[0]


def inputs() -> list[int]:
    """Returns the bits of the inputs, in order and without duplicates."""
    found = []
    for dtype, _ in KINDS.values():
        codes = torch.arange(0, 0x80, dtype=torch.uint8).view(dtype).float().tolist()
        codes = [x for x in codes if x == x and x != float("inf")]
        for a, b in zip(codes[::3], codes[1::3]):
            tie = bits((a + b) / 2)
            found += [tie - 1, tie, tie + 1, tie | 0x80000000]
    for x in [448.0, 449.0, 464.0, 465.0, 480.0, 57344.0, 57345.0, 61440.0, 61441.0, 65536.0, 3.4e38]:
        found += [bits(x), bits(-x)]
    found += [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7FC00000, 0x7F800001]
    found += [bits(1.1 * 1.7**k) for k in range(-45, 24)]
    return list(dict.fromkeys(found))


def main() -> None:
    rows = inputs()
    x = torch.tensor([b - (1 << 32) if b >> 31 else b for b in rows], dtype=torch.int32).view(torch.float32)
    columns = []
    for dtype, largest in KINDS.values():
        columns.append(x.clamp(-largest, largest).to(dtype).view(torch.uint8).tolist())
    lines = [
        f"# made by proof/goldens/fp8/make.py with torch {torch.__version__}: f32 bits, e4m3 byte, e5m2 byte"
    ]
    lines += [f"{b:08x},{c[0]:02x},{c[1]:02x}" for b, c in zip(rows, zip(*columns))]
    OUT.write_text("\n".join(lines) + "\n")
    print(f"{len(rows)} inputs written to {OUT}")


if __name__ == "__main__":
    main()
