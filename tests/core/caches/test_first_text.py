"""A first text is the same whatever has become of kept files."""

import os
import random
import subprocess
import sys

import pytest

from specbeam.core.compiling import AVAILABLE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not AVAILABLE, reason="numba is not installed")]
PROGRAM = """
import specbeam as sb
texts = sb.generate(sb.load("bundled"), ["Die Katze schläft.", "Guten Morgen!"], seed=1)
print([beam.tokens for text in texts for beam in text.beams])
"""


def text_of(cache):
    """The tokens of a process's texts, and its warnings about kept files."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SPECBEAM_CACHE": str(cache)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "SPECBEAM_CACHE" in line]


def test_a_first_text_is_the_same_whatever_became_of_kept_files(tmp_path):
    (text, warned) = text_of(tmp_path)
    assert not warned
    kept = sorted(tmp_path.rglob("*.nbc")) + sorted(tmp_path.rglob("*.json"))
    assert len(kept) > 200
    assert text_of(tmp_path) == (text, [])
    chance = random.Random(1)
    for path in chance.sample(kept, 40):
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content))
        if chance.random() < 0.5:
            content[place] ^= 1 << chance.randrange(8)
        else:
            del content[place:]
        path.write_bytes(bytes(content))
    assert text_of(tmp_path) == (text, [])
