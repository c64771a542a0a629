"""Every call inside specbeam is checked for types and shapes while the tests run."""

from jaxtyping import install_import_hook

import tests.support.checking  # noqa: F401 - the hook looks it up by name

install_import_hook("specbeam", "tests.support.checking.checked")
