"""The files for operators: they can be read, and what they start exists."""

import json
import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from specbeam.apps.serve.config import ServerConfig
from specbeam.doors.cli.main import app

ROOT = Path(__file__).parent.parent
FILES = ROOT / "examples" / "serve"
DRAIN_S = ServerConfig().drain_timeout


def checked_arguments(arguments):
    """The options of `specbeam serve` in a command line; an unknown one ends the parsing with an error."""
    command = get_command(app).commands["serve"]
    return command.make_context("serve", list(arguments), resilient_parsing=False).params


def of_dockerfile(instruction):
    """The text of all instructions of a kind, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (FILES / "Dockerfile").read_text(encoding="utf-8"))
    return re.findall(rf"^{instruction} (.*)$", text, re.MULTILINE)


def test_the_image_copies_what_exists_and_starts_the_server():
    for copied in of_dockerfile("COPY"):
        if not copied.startswith("--from"):
            for source in copied.split()[:-1]:
                assert (ROOT / source).exists(), source
    (entry,) = of_dockerfile("ENTRYPOINT")
    program, command, *arguments = json.loads(entry)
    assert (program, command) == ("specbeam", "serve")
    assert checked_arguments(arguments)["host"] == "0.0.0.0"
    stated = {name.split("=")[0] for name in of_dockerfile("ARG")}
    assert stated == {"PYTHON", "TORCH_INDEX", "EXTRAS", "COMPILE", "PACKAGES"}
    assert of_dockerfile("USER") == ["10001"]
    assert "/health" in of_dockerfile("HEALTHCHECK")[0]


def test_the_image_gets_all_files_that_it_copies():
    """What Dockerfile.dockerignore leaves out is not there while the image is built."""
    kept = {line[1:] for line in (FILES / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for line in of_dockerfile("COPY") if "--from" not in line for source in line.split()[:-1]}
    assert copied == kept


def test_compose_starts_the_server_on_a_read_only_root():
    content = yaml.safe_load((FILES / "compose.yaml").read_text(encoding="utf-8"))
    service = content["services"]["specbeam"]
    found = checked_arguments([re.sub(r"\$\{MODEL:-(\w+)\}", r"\1", one) for one in service["command"]])
    assert found["model"] == "bundled"
    assert found["api_key_file"] == "/run/secrets/keys"
    assert service["read_only"] is True
    assert (ROOT / "examples" / "serve" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert {volume.split(":")[0] for volume in service["volumes"]} & content["volumes"].keys() == {"cache"}
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_S


def test_kubernetes_runs_it_as_a_user_on_a_read_only_root():
    deployment, service = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    scrapes = annotations["prometheus.io/scrape"] == "true"
    assert checked_arguments(container["args"])["open_metrics"] is scrapes  # collectors send no key of the server
    assert annotations["prometheus.io/path"] == "/metrics"
    assert checked_arguments(container["args"])["api_key_file"] == "/keys/keys.txt"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    written = {variable["value"] for variable in container["env"]}
    assert all(Path(path).parent == Path(mounted["cache"]) for path in written)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    ports = {port["name"] for port in container["ports"]}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {probe["port"] for probe in probes} | {service["spec"]["ports"][0]["targetPort"]} <= ports
    assert {probe["path"] for probe in probes} == {"/health", "/live"}


def test_the_unit_starts_the_server():
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(FILES / "specbeam.service")
    service = unit["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (program, command) == ("/opt/specbeam/bin/specbeam", "serve")
    assert checked_arguments(arguments)["config"] is None
    assert int(service["TimeoutStopSec"]) > DRAIN_S
    written = dict(one.split("=") for one in service["Environment"].split())
    assert all(path.startswith("/var/cache/" + service["CacheDirectory"]) for path in written.values())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_reads_the_unit(tmp_path):
    """With a program in place of the one that is not installed here."""
    text = (FILES / "specbeam.service").read_text().replace("/opt/specbeam/bin/specbeam", "/bin/true")
    (tmp_path / "specbeam.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "specbeam.service"], capture_output=True, text=True
    )
    assert "specbeam.service" not in done.stderr, done.stderr
