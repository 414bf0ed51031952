"""Words of one tensor to payload bytes and back, one loop per rule of the page.

Every `unpack_*` inverts its `pack_*` and ignores the bytes no rule assigns; `pack(unpack(payload)) == payload`
therefore also says that those bytes are zero.

Source: layouts.md.
"""

from collections.abc import Sequence

from .encoders import GROUPED

ALIGNMENT = 256
LAYOUTS = {
    "BF16": "contiguous-le-v1",
    "FP32": "contiguous-le-v1",
    "I32": "contiguous-le-v1",
    "Q4G64_F16S": "row-split-k128-v1",
    "Q5G64_F16S": "row-split-k128-v1",
    "Q6G64_F16S": "row-split-k128-v1",
    "W8G32_F16S": "row-split-k128-v1",
    "NVFP4": "blockscale-k16-m128x4-v1",
    "FP8_E4M3FN_ROW_BF16S": "row-scale-v1",
}
WORD_BYTES = {"BF16": 2, "FP32": 4, "I32": 4}
HIGH_GROUP_BYTES = {"Q4G64_F16S": 0, "Q5G64_F16S": 8, "Q6G64_F16S": 16, "W8G32_F16S": 0}


def align_up(value: int, alignment: int) -> int:
    """Returns ceil(value / alignment) * alignment."""
    return (value + alignment - 1) // alignment * alignment


def nibbles(packed: bytes) -> list[int]:
    """Returns the 4-bit words of packed bytes, low nibble first."""
    return [nibble for byte in packed for nibble in (byte & 15, byte >> 4)]


def groups_per_row(name: str, k: int) -> int:
    """Returns the stored groups of one row of a grouped format, those wholly beyond K included."""
    return align_up(k, 128) // GROUPED[name].group


def planes(name: str, shape: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Returns (offset, bytes) of every plane by name, in stored order; `high` only where it has bytes."""
    if name in WORD_BYTES:
        count = 1
        for dimension in shape:
            count *= dimension
        return {"words": (0, count * WORD_BYTES[name])}
    n, k = shape
    if name in GROUPED:
        stored = n * groups_per_row(name, k)
        base, high = stored * 32, stored * HIGH_GROUP_BYTES[name]
        high_offset = align_up(base, ALIGNMENT)
        scale_offset = high_offset + align_up(high, ALIGNMENT)
        middle = {"high": (high_offset, high)} if high else {}
        return {"base": (0, base), **middle, "scale": (scale_offset, stored * 2)}
    if name == "NVFP4":
        code, scale = n * k // 2, n * k // 16
        scale_offset = align_up(code, ALIGNMENT)
        return {"code": (0, code), "scale": (scale_offset, scale), "divisor": (scale_offset + scale, 4)}
    return {"code": (0, n * k), "scale": (align_up(n * k, ALIGNMENT), 2 * n)}


def payload_bytes(name: str, shape: Sequence[int]) -> int:
    """Returns the exact encoded size of a tensor."""
    return max(offset + nbytes for offset, nbytes in planes(name, shape).values())


def pack_contiguous(name: str, words: Sequence[int]) -> bytes:
    """Direct words in C order to payload."""
    return b"".join(word.to_bytes(WORD_BYTES[name], "little") for word in words)


def unpack_contiguous(name: str, payload: bytes) -> list[int]:
    """Payload to direct words in C order."""
    width = WORD_BYTES[name]
    return [int.from_bytes(payload[i : i + width], "little") for i in range(0, len(payload), width)]


def pack_row_split(name: str, scales: Sequence[Sequence[int]], codes: Sequence[Sequence[int]]) -> bytes:
    """Scale words [N][ceil(K / G)] and signed codes [N][K] to payload."""
    bits, length = GROUPED[name].bits, GROUPED[name].group
    shape = (len(codes), len(codes[0]))
    where = planes(name, shape)
    payload = bytearray(payload_bytes(name, shape))
    for row in range(shape[0]):
        for group in range(groups_per_row(name, shape[1])):
            lanes = list(codes[row][group * length : (group + 1) * length])
            lanes += [0] * (length - len(lanes))
            u = [lane % (1 << bits) for lane in lanes]
            index = row * groups_per_row(name, shape[1]) + group
            base = where["base"][0] + index * 32
            payload[base : base + 32] = _base_bytes(bits, u)
            if "high" in where:
                width = HIGH_GROUP_BYTES[name]
                high = where["high"][0] + index * width
                payload[high : high + width] = _high_bytes(bits, u)
            word = scales[row][group] if group < len(scales[row]) else 0
            scale = where["scale"][0] + index * 2
            payload[scale : scale + 2] = word.to_bytes(2, "little")
    return bytes(payload)


def unpack_row_split(
    name: str, shape: Sequence[int], payload: bytes
) -> tuple[list[list[int]], list[list[int]]]:
    """Payload to (scale words [N][ceil(K / G)], signed codes [N][K])."""
    bits, length = GROUPED[name].bits, GROUPED[name].group
    n, k = shape
    where = planes(name, shape)
    scales, codes = [], []
    for row in range(n):
        row_scales, row_codes = [], []
        for group in range(align_up(k, length) // length):
            index = row * groups_per_row(name, k) + group
            base = where["base"][0] + index * 32
            u = _base_lanes(bits, payload[base : base + 32])
            if "high" in where:
                width = HIGH_GROUP_BYTES[name]
                high = where["high"][0] + index * width
                _add_high_lanes(bits, u, payload[high : high + width])
            row_codes += [lane - (1 << bits) if lane >= 1 << (bits - 1) else lane for lane in u]
            scale = where["scale"][0] + index * 2
            row_scales.append(int.from_bytes(payload[scale : scale + 2], "little"))
        scales.append(row_scales)
        codes.append(row_codes[:k])
    return scales, codes


def _base_bytes(bits: int, u: list[int]) -> bytes:
    if bits == 8:
        return bytes(u)
    return bytes((u[2 * j] & 15) | (u[2 * j + 1] & 15) << 4 for j in range(32))


def _base_lanes(bits: int, base: bytes) -> list[int]:
    if bits == 8:
        return list(base)
    return nibbles(base)


def _high_bytes(bits: int, u: list[int]) -> bytes:
    stream = [lane >> bit & 1 for lane in u for bit in range(4, bits)]
    out = bytearray(len(stream) // 8)
    for t, bit in enumerate(stream):
        out[t // 8] |= bit << t % 8
    return bytes(out)


def _add_high_lanes(bits: int, u: list[int], high: bytes) -> None:
    t = 0
    for lane in range(len(u)):
        for bit in range(4, bits):
            u[lane] |= (high[t // 8] >> t % 8 & 1) << bit
            t += 1


def swizzled_offset(n: int, g: int, k: int) -> int:
    """Returns the byte of the NVFP4 scale plane that holds the scale of row n, group g = k // 16."""
    return (n // 128 * (k // 64) + g // 4) * 512 + (n % 128 % 32) * 16 + (n % 128 // 32) * 4 + g % 4


def pack_blockscale(codes: Sequence[Sequence[int]], scales: Sequence[Sequence[int]], divisor: int) -> bytes:
    """E2M1 words [N][K], natural E4M3FN words [N][K / 16] and the FP32 word to payload."""
    n, k = len(codes), len(codes[0])
    where = planes("NVFP4", (n, k))
    payload = bytearray(payload_bytes("NVFP4", (n, k)))
    for row in range(n):
        for j in range(k // 2):
            payload[row * k // 2 + j] = codes[row][2 * j] | codes[row][2 * j + 1] << 4
        for group in range(k // 16):
            payload[where["scale"][0] + swizzled_offset(row, group, k)] = scales[row][group]
    payload[where["divisor"][0] :] = divisor.to_bytes(4, "little")
    return bytes(payload)


def unpack_blockscale(shape: Sequence[int], payload: bytes) -> tuple[list[list[int]], list[list[int]], int]:
    """Payload to (E2M1 words [N][K], natural E4M3FN words [N][K / 16], FP32 word)."""
    n, k = shape
    where = planes("NVFP4", shape)
    codes, scales = [], []
    for row in range(n):
        codes.append(nibbles(payload[row * k // 2 : (row + 1) * k // 2]))
        start = where["scale"][0]
        scales.append([payload[start + swizzled_offset(row, group, k)] for group in range(k // 16)])
    return codes, scales, int.from_bytes(payload[where["divisor"][0] :], "little")


def pack_row_scale(scales: Sequence[int], codes: Sequence[Sequence[int]]) -> bytes:
    """BF16 words [N] and E4M3FN words [N][K] to payload."""
    code = b"".join(bytes(row) for row in codes)
    padding = bytes(align_up(len(code), ALIGNMENT) - len(code))
    return code + padding + b"".join(scale.to_bytes(2, "little") for scale in scales)


def unpack_row_scale(shape: Sequence[int], payload: bytes) -> tuple[list[int], list[list[int]]]:
    """Payload to (BF16 words [N], E4M3FN words [N][K])."""
    n, k = shape
    start = planes("FP8_E4M3FN_ROW_BF16S", shape)["scale"][0]
    scales = [int.from_bytes(payload[start + 2 * row : start + 2 * row + 2], "little") for row in range(n)]
    return scales, [list(payload[row * k : (row + 1) * k]) for row in range(n)]
