"""The public names of this package, each once: `specbeam.core.lazy` reads this list when the package runs."""

from specbeam.apps.speech.audio import read_audio as read_audio
