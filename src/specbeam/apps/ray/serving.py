"""A Ray Serve deployment of `specbeam serve`: each replica has its own pair and engine."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from specbeam.apps.serve.config import ServerConfig, read_config
from specbeam.errors import BadSetting, MissingPackage

if TYPE_CHECKING:
    from ray.serve import Application

STICKY = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
RETRY_AFTER_S = 1.0  # Retry-After of a request that Ray rejects
MARGIN_S = 5.0  # seconds to send the last answers after `drain_timeout`
HEALTH_S = 2.0  # seconds between two health checks of a replica
CONSTRUCTIONS = 3  # attempts to start a replica before the deployment counts as failed


class Replica:
    """A server in a process of Ray Serve. It gets requests once its pair is loaded and its steps are compiled.

    Args:
        config: the operator's settings.
    """

    def __init__(self, config: ServerConfig) -> None:
        from specbeam.apps.serve.app import BeamServer
        from specbeam.apps.serve.logs import set_up_log
        from specbeam.apps.serve.run import load_pair

        set_up_log(config.log_level)
        self.server = BeamServer(config, partial(load_pair, config))
        self.server.start()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the routes. Ray runs their lifespan, which stops the engine at its end."""
        from specbeam.apps.serve.app import make_app

        routes = make_app(self.server)
        return near_clients_only(routes) if self.server.config.is_local else routes

    def check_health(self) -> None:
        """Raise `RuntimeError` if the engine is dead or stuck; Ray then replaces this replica."""
        if reason := self.server.cause_of_death():
            self.server.give_up(reason)
            raise RuntimeError(f"the engine of this replica is dead: {reason}")


def near_clients_only(routes: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return routes that refuse clients on other machines; Ray does not know `host`."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or _is_near(scope.get("client")):
            await routes(scope, receive, send)
            return
        from specbeam.apps.serve.refusals import Refusal

        message = (
            "this deployment answers clients on its own machine only; deploy it with host set to the address that Ray "
            "listens on, and with an api_key_file, or no_auth if that is intended"
        )
        await Refusal(403, "permission_error", "forbidden", message).response()(scope, receive, send)

    return guarded


def _is_near(client: Any) -> bool:
    """Return whether a client, (address, port), is on this machine; False if its address is unknown."""
    try:
        return bool(client) and ip_address(client[0]).is_loopback
    except ValueError:  # a host name
        return False


def deployment(config: ServerConfig | None = None, *, sticky: bool = True, **options: Any) -> "Application":
    """Return replicas of a server for ``ray.serve.run``.

    Each replica is a process with its own pair, engine and prefix cache. Ray sends it requests once it is ready, removes it
    if its engine is dead, and lets its requests finish before stopping it. Texts are those of `specbeam serve`: a seed
    gives the same text on each replica.

    A replica accepts `max_running` + `max_waiting` requests, and `max_waiting` more wait in Ray's proxy; further requests
    are refused with status 429 and Retry-After. A stopping replica has `drain_timeout` seconds to finish its requests.

    Args:
        config: as for `specbeam serve`; None: its defaults, the bundled pair. `port` has no effect, because Ray listens.
            `host` decides who may call: by default clients on this machine only; with another address, which needs keys,
            all clients.
        sticky: whether requests with the same header ``x-session-id`` go to the same replica while it lives, where the
            prefix cache has their conversation. Requests without the header are distributed.
        options: options of ``ray.serve.deployment``, which override those derived from `config`: `num_replicas`,
            `autoscaling_config`, `ray_actor_options`, `max_ongoing_requests`, and others.

    Raises:
        MissingPackage: ray[serve] is not installed.
        BadSetting: other machines could call the server without a key, or `tensor_parallel` is set.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise MissingPackage(f"replicas need the package {error.name}: pip install 'specbeam[replicas]'") from error
    config = config or ServerConfig()
    config.check_open()
    if config.tensor_parallel:
        raise BadSetting(
            "tensor_parallel needs processes started by torchrun, but Ray starts the replicas; leave it out"
        )
    made = serve.deployment(serve.ingress()(Replica), name="specbeam", **options_of(config, sticky, options))
    return made.bind(config)


def options_of(config: ServerConfig, sticky: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Ray's deployment, derived from a configuration and overridden by `given`."""
    own: dict[str, Any] = {
        "max_ongoing_requests": config.max_running + config.max_waiting,
        "max_queued_requests": max(config.max_waiting, 1),
        "backpressure_config": {"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        "graceful_shutdown_timeout_s": config.drain_timeout + MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_S,
        "max_constructor_retry_count": CONSTRUCTIONS,
    }
    if sticky:
        own["request_router_config"] = {"request_router_class": STICKY}
    return own | dict(given)


def app(arguments: Mapping[str, Any]) -> "Application":
    """Return the deployment of these arguments, for ``serve run specbeam.apps.ray:app model=TARGET num_replicas=2``.

    Args:
        arguments: arguments of `ServerConfig` and `deployment` by name, and `config`, a file with fields of `ServerConfig`.
            Strings, as a command line passes them, are parsed as YAML.

    Raises:
        BadSetting, MissingFile: as `deployment` and `read_config`; also for a name that neither the server nor Ray knows.
    """
    values = {}
    for name, value in arguments.items():
        values[name] = _read(name, value) if isinstance(value, str) else value
    own = {one.name for one in fields(ServerConfig)}
    path = values.pop("config", None)
    sticky = values.pop("sticky", True)
    config = read_config(path, {name: value for name, value in values.items() if name in own})
    options = {name: value for name, value in values.items() if name not in own}
    try:
        return deployment(config, sticky=sticky, **options)
    except TypeError as error:  # Ray's error for an unknown option
        if not options:
            raise
        raise BadSetting(
            f"at least one of {', '.join(options)} is neither a setting of the server nor of Ray's deployments: {error}"
        ) from error


def _read(name: str, text: str) -> Any:
    """Return the value of a string from the command line. Raises `BadSetting` if it is not YAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadSetting(f"{name} is {text!r}, which is not YAML: {error}") from error
