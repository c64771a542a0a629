"""The options of `specbeam serve`: each field of the configuration is one, and what is given reaches it."""

from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbeam.apps.serve.config import ServerConfig, read_config
from specbeam.doors.cli.main import app
from specbeam.doors.cli.serve_options import SERVER_OPTIONS, given_options

pytest.importorskip("uvicorn")


@pytest.fixture
def given(monkeypatch):
    """What the command was given, in place of a server."""
    seen = []

    def read(config, options):
        seen.append((config, options))
        return ServerConfig()

    monkeypatch.setattr("specbeam.apps.serve.config.read_config", read)
    monkeypatch.setattr("specbeam.apps.serve.run.serve", lambda config: 0)
    return seen


def test_all_that_can_be_configured_is_an_option_and_nothing_else():
    assert set(SERVER_OPTIONS) == {one.name for one in fields(ServerConfig)}


def test_what_is_given_reaches_the_configuration_and_all_else_is_left_to_it(given, tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text("max_beams: 3\nmax_texts: 99\nport: 1\n")
    line = (
        f"serve --config {config} -m target -d draft --set beams=2 --set depth=3 --method dsbd --methods a,b --port 0 "
        "--api-key one --api-key two --max-texts 7 --max-schema 8 --max-running-per-key 2 --compile-timeout 0.5 "
        "--reader-timeout 5 --stall-timeout 6 --prefix-cache-mb 9 --prefix-cache-shared --log-texts --no-warm-up "
        "--default-beams 2 --cors-origin http://a --allowed-host b --kv-gb 0.5"
    )
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    ((file, options),) = given
    assert file == Path(config)
    found = read_config(file, options)
    assert found == ServerConfig(
        model="target", draft="draft", settings=("beams=2", "depth=3"), method="dsbd", methods=("a", "b"), port=0,
        api_keys=("one", "two"), max_texts=7, max_schema=8, max_running_per_key=2, compile_timeout=0.5,
        reader_timeout=5, stall_timeout=6, prefix_cache_mb=9, prefix_cache_shared=True, log_texts=True, warm_up=False,
        default_beams=2, cors_origins=("http://a",), allowed_hosts=("b",), kv_gb=0.5, max_beams=3,
    )  # fmt: skip


def test_without_options_nothing_is_given(given):
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert given == [(None, {})]
    assert given_options({"port": 0, "model": None, "api_keys": [], "no_auth": False}) == {"port": 0}
    assert CliRunner().invoke(app, ["serve", "--port", "many"]).exit_code == 2
