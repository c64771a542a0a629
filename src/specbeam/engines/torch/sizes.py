"""Sizes to which passes are padded, so that few graphs serve all passes."""


def rounded_up(count: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... that is at least `count`."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
