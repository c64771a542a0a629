"""Sizes that passes are filled up to, so that few graphs serve all of them."""


def up(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
