"""Replicas by Ray Serve: the limits of the server, prompts that stay where they are known, kills and ends under load."""

import asyncio
import json
import os
import random
import signal
import socket
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from specbeam.apps.ray.serving import STICKY, Replica, app, deployment, near_clients_only, options_of
from specbeam.apps.serve.app import BeamServer
from specbeam.apps.serve.config import ServerConfig
from specbeam.errors import BadSetting, MissingFile
from tests.support import words
from tests.support.figures import show

httpx = pytest.importorskip("httpx2")
CONFIG = ServerConfig(name="tiny", warm_up=False, chunk=16, max_running=4, max_waiting=60, kv_gb=0.2)
SAMPLED = {"specbeam": {"method": "sampling"}, "ignore_eos": True}


def test_limits_of_the_server_are_those_of_ray_and_what_is_given_goes_before_them():
    own = options_of(CONFIG, True, {})
    assert own["max_ongoing_requests"] == 64
    assert own["max_queued_requests"] == 60
    assert own["backpressure_config"] == {"status_code": 429, "retry_after_s": 1.0}
    assert own["graceful_shutdown_timeout_s"] > CONFIG.drain_timeout
    assert own["request_router_config"] == {"request_router_class": STICKY}
    scaled = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    given = options_of(CONFIG, False, {"autoscaling_config": scaled, "max_queued_requests": 3})
    assert given["autoscaling_config"] == scaled
    assert given["max_queued_requests"] == 3
    assert "request_router_config" not in given


def test_a_replica_is_healthy_until_its_engine_is_dead():
    replica = object.__new__(Replica)  # its pair comes from memory, not from files
    replica.server = BeamServer(CONFIG, lambda: words.pair(check=False))
    replica.check_health()  # as long as it loads, Ray waits for it
    replica.server.start()
    try:
        replica.check_health()
        replica.server.engine.abandon("nobody knows why")
        with pytest.raises(RuntimeError, match="the engine of this replica is dead"):
            replica.check_health()
        assert replica.server.state == "failed"
    finally:
        replica.server.engine.close()
        replica.server.close_pools()


def test_the_routes_of_a_replica_leave_its_engine_alone_and_end_it_with_them():
    replica = object.__new__(Replica)
    replica.server = BeamServer(CONFIG, lambda: words.pair(check=False))
    replica.server.start()
    engine = replica.server.engine
    said = []

    async def run():
        orders = iter(["lifespan.startup", "lifespan.shutdown"])

        async def receive():
            return {"type": next(orders)}

        async def send(message):
            said.append((message["type"], replica.server.engine is engine, engine.state))

        await replica.__serve_build_asgi_app__()({"type": "lifespan"}, receive, send)

    asyncio.run(run())
    assert said == [("lifespan.startup.complete", True, "ready"), ("lifespan.shutdown.complete", True, "ended")]


def test_clients_of_other_machines_are_refused_wherever_ray_listens():
    calls = []
    sent = []

    async def routes(scope, receive, send):
        calls.append(scope)

    async def send(message):
        sent.append(message)

    guarded = near_clients_only(routes)
    for scope in ({"type": "lifespan"}, {"type": "http", "client": ("127.0.0.1", 5)}):
        asyncio.run(guarded(scope, None, send))
    assert len(calls) == 2
    for client in (("192.0.2.7", 5), None, ("testclient", 5)):  # far, or nobody knows
        sent.clear()
        asyncio.run(guarded({"type": "http", "client": client}, None, send))
        assert len(calls) == 2
        assert sent[0]["status"] == 403
        assert json.loads(sent[1]["body"])["error"]["code"] == "forbidden"


def test_arguments_of_a_deployment_are_those_of_the_server_and_of_ray(tmp_path):
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built  # by `serve run`

    built(app, {"model": "somewhere", "max_running": "2", "num_replicas": "2", "ray_actor_options": "{num_cpus: 0.5}"})
    with pytest.raises(BadSetting, match="without a key"):
        app({"host": "0.0.0.0"})
    with pytest.raises(BadSetting, match="max_running is 0"):
        app({"max_running": "0"})
    with pytest.raises(BadSetting, match="at least one of replicas is neither"):
        app({"replicas": 2})
    with pytest.raises(BadSetting, match=r"max_running is '\{', which is not YAML"):
        app({"max_running": "{"})
    with pytest.raises(MissingFile, match="could not read the configuration"):
        app({"config": str(tmp_path / "none.yaml")})
    with pytest.raises(BadSetting, match="leave it out"):
        deployment(ServerConfig(tensor_parallel=True, prefix_cache_mb=0))


# On a cluster of this machine.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster for all tests of this file, and the folder of a pair."""
    ray = pytest.importorskip("ray", reason="ray is not installed (pip install 'ray[serve]')")
    serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    mark = str(uuid.uuid4())
    before = dict(os.environ)
    os.environ |= {"SPECBEAM_CLUSTER": mark, "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.abspath("src"), os.path.abspath(".")])
    settings = {"num_cpus": 4, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    try:
        for left in (1, 0):
            try:
                ray.init(**settings, logging_level="ERROR", log_to_driver=False)
                break
            except Exception:  # a raylet has 30 seconds to start, however busy the machine is
                if not left:
                    raise
                ray.shutdown()
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Cluster(serve, mark, words.saved(tmp_path_factory.mktemp("pair")), f"http://127.0.0.1:{port}")
        serve.shutdown()
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ |= before


class Cluster:
    def __init__(self, serve, mark, pair, url):
        self.serve = serve
        self.mark = mark
        self.pair = pair
        self.url = url

    @contextmanager
    def serving(self, config, **options):
        """Replicas of a server with this configuration; yields their address."""
        target, draft = self.pair
        own = ServerConfig(**{**config.__dict__, "model": target, "draft": draft})
        made = deployment(own, ray_actor_options={"num_cpus": 0.5}, **options)
        self.serve.run(made, name="specbeam")
        try:
            yield self.url
        finally:
            self.serve.delete("specbeam")

    def replicas(self):
        """The processes of the replicas."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    name = file.read()
                with open(f"/proc/{entry}/environ", "rb") as file:
                    surroundings = file.read()
            except OSError:
                continue
            if name.startswith(b"ray::ServeReplica:specbeam") and self.mark.encode() in surroundings:
                found.append(int(entry))
        return found

    def running(self):
        """How many replicas Ray counts as running."""
        application = self.serve.status().applications["specbeam"]
        return application.deployments["specbeam"].replica_states.get("RUNNING", 0)


def until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} within {seconds} s"
        time.sleep(0.2)


def conversation(number):
    rng = random.Random(number)
    return "".join(rng.choice(words.CHARACTERS) for _ in range(220))


def known_share(url, with_session):
    """The share of the tokens of prompts that a single server would know, which these replicas knew."""
    known = 0
    possible = 0
    with httpx.Client(base_url=url, timeout=300) as http:
        for length in range(60, 220, 32):
            for number in range(16):
                text = conversation(f"{number} {with_session}")
                headers = {"x-session-id": f"conversation {number}"} if with_session else {}
                body = {"prompt": text[:length], "max_tokens": 2, "seed": 0} | SAMPLED
                answer = http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                known += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                possible += 16 * ((length - 32) // 16) if length > 60 else 0
    return known / possible


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found in /proc")
def test_conversations_stay_where_they_are_known_and_a_killed_replica_costs_what_was_under_way(cluster):
    with cluster.serving(CONFIG, num_replicas=2) as url:
        kept = known_share(url, with_session=True)
        spread = known_share(url, with_session=False)
        show(f"\ntokens of prompts that were known: {kept:.3f} with sessions, {spread:.3f} without")
        assert kept == 1.0
        assert spread < 0.95

        more = {"max_tokens": 150, "n": 4}
        bodies = [{"prompt": f"abc {number}", "seed": number} | more | SAMPLED for number in range(160)]
        with ThreadPoolExecutor(8) as clients:
            expected = list(clients.map(lambda body: ask(url, body), bodies))
        assert {status for status, _, _ in expected} == {200}
        replicas = cluster.replicas()
        assert len(replicas) == 2
        answers = []
        began = time.monotonic()

        def ask_until_answered(body):
            tries = 0
            while True:
                start = time.monotonic()
                status, text, retry_after = ask(url, body)
                answers.append((start, time.monotonic(), status, retry_after))
                if status == 200:
                    return tries, text
                tries += 1
                assert tries < 20, text
                time.sleep(0.5)

        def kill_under_load():
            until(lambda: len(answers) > 30, 60, "answers come")
            os.kill(replicas[0], signal.SIGKILL)
            return len(answers)

        with ThreadPoolExecutor(8) as clients, ThreadPoolExecutor(1) as killer:
            killing = killer.submit(kill_under_load)
            found = list(clients.map(ask_until_answered, bodies))
        seconds = time.monotonic() - began
        assert killing.result() < len(bodies) - 30, "it was nearly over before the replica was killed; ask more"
        failed = [one for one in answers if one[2] != 200]
        show(f"{len(bodies)} requests in {seconds:.1f} s; without an answer: {Counter(one[2] for one in failed)}")
        assert [text for _, text in found] == [text for _, text, _ in expected]
        assert 1 <= len(failed) <= 8  # those of the eight clients that were under way there
        assert {one[2] for one in failed} <= {0, 500, 503}  # all of them are tried again by OpenAI's client
        until(lambda: cluster.running() == 2 and replicas[0] not in cluster.replicas(), 240, "another replica runs")
        again = [ask(url, body) for body in bodies[:20]]
        assert [text for _, text, _ in again] == [text for _, text, _ in expected[:20]]


def ask(url, body):
    """Return status, text and Retry-After of an answer; the status is 0 if the connection broke."""
    try:
        answer = httpx.post(url + "/v1/completions", json=body, timeout=300)
    except httpx.HTTPError as error:
        return 0, str(error), None
    if answer.status_code != 200:
        return answer.status_code, answer.text, answer.headers.get("retry-after")
    return 200, [choice["text"] for choice in answer.json()["choices"]], None


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found in /proc")
def test_who_finds_no_place_is_told_so_and_streams_under_way_are_delivered_whole(cluster):
    openai = pytest.importorskip("openai")
    narrow = ServerConfig(**{**CONFIG.__dict__, "max_running": 1, "max_waiting": 255, "max_texts": 1024})
    with cluster.serving(narrow, num_replicas=1, max_ongoing_requests=2, max_queued_requests=1) as url:
        long = {"prompt": "abc", "seed": 4, "max_tokens": 200, "n": 8} | SAMPLED
        with ThreadPoolExecutor(10) as clients:
            found = list(clients.map(lambda number: ask(url, long | {"seed": number}), range(10)))
        counts = Counter(status for status, _, _ in found)
        show(f"\n10 requests at once, 3 places: {dict(counts)}")
        assert set(counts) == {200, 429}
        assert counts[200] >= 1  # Ray's queue refuses what comes before it has found the places free
        assert {after for status, _, after in found if status == 429} == {"1"}
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=30)

        def patient(number):
            more = {"ignore_eos": True, **SAMPLED}
            return client.completions.create(
                model="tiny", prompt="abc", seed=number, max_tokens=200, n=8, extra_body=more
            )

        with ThreadPoolExecutor(6) as clients:
            texts = [[choice.text for choice in one.choices] for one in clients.map(patient, range(6))]
        first = {number: text for number, (status, text, _) in enumerate(found) if status == 200}
        assert all(texts[number] == text for number, text in first.items() if number < 6)

        # What is too much for the engine itself is refused by it, in the server's own form.
        status, text, after = ask(url, {"prompt": ["abc"] * 20, "n": 16, "max_tokens": 4} | SAMPLED)
        assert (status, json.loads(text)["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(after) <= 60

        long |= {"prompt": [f"abc {number}" for number in range(15)], "n": 16}
        status, whole, _ = ask(url, long)
        assert status == 200
        times = {}

        def end_it():
            times["deleted"] = time.monotonic()
            cluster.serve.delete("specbeam", _blocking=False)
            until(
                lambda: httpx.get(url + "/live", timeout=60).status_code != 200,
                60,
                "the application is gone for others",
            )
            times["refused"] = time.monotonic()

        pieces = {}
        with (
            httpx.Client(timeout=300) as http,
            http.stream("POST", url + "/v1/completions", json=long | {"stream": True}) as stream,
            ThreadPoolExecutor(1) as other,
        ):
            ending = None
            is_over = False
            for line in stream.iter_lines():
                ending = ending or other.submit(end_it)
                if line == "data: [DONE]":
                    is_over = True
                elif line.startswith("data: "):
                    for choice in json.loads(line[6:])["choices"]:
                        pieces.setdefault(choice["index"], []).append((time.monotonic(), choice["text"]))
            ending.result()
        assert is_over
        assert ["".join(text for _, text in pieces[index]) for index in range(240)] == whole
        late = [time for each in pieces.values() for time, _ in each if time > times["refused"]]
        assert late
        show(
            f"others were refused {times['refused'] - times['deleted']:.2f} s after the end was asked for, and {len(late)} of "
            f"{sum(map(len, pieces.values()))} pieces of the stream came later, the last after {max(late) - times['deleted']:.2f} s"
        )
        until(lambda: not cluster.replicas(), 60, "the replica has ended")
