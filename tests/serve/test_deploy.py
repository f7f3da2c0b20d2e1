"""The files in deploy/ are right about the server: its options, its probes and its port, and how long it may take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer
import yaml

from deltune.cli.app import app
from deltune.cli.serve import serve_app
from deltune.serve.api import operation_routes
from deltune.serve.config import ServeConfig

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def config() -> ServeConfig:
    return ServeConfig.from_values(read("serve.yaml"))


def open_paths() -> set[str]:
    return {route.path for route in operation_routes.router.routes}  # type: ignore[attr-defined]


def test_the_config_is_one() -> None:
    """It listens on all addresses, so it has keys; what it drains fits into the time that the orchestrators give."""
    settings = config()
    assert settings.http.host == "0.0.0.0" and settings.http.keys
    needed = settings.http.drain + settings.http.drain_delay
    assert int(read("compose.yaml")["services"]["serve"]["stop_grace_period"].rstrip("s")) > needed
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed


def test_compose() -> None:
    service = read("compose.yaml")["services"]["serve"]
    targets = {volume.split(":")[1] for volume in service["volumes"]}
    settings = config()
    assert {settings.deltas.folder, str(Path(settings.model.name).parent), "/etc/deltune/serve.yaml"} <= targets
    assert service["ports"] == [f"{settings.http.port}:{settings.http.port}"]
    keys = str(Path(str(settings.http.keys)).parent)
    assert keys in targets, "a folder: where a file is mounted, a new version of it is not seen"
    assert "/ready" in service["healthcheck"]["test"][-1] and "/ready" in open_paths()
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
    dockerfile = DEPLOY.parent / "deploy" / "Dockerfile"
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == dockerfile
    assert set(service["build"]["args"]) == set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.MULTILINE))
    for copied in re.findall(r"^COPY (.*) \S+$", dockerfile.read_text(), re.MULTILINE):
        assert all((DEPLOY.parent / name).exists() for name in copied.split())


def test_compose_makes_keys_that_the_server_can_read() -> None:
    """In the same image, by the same user, and in the folder that the server reads, where it is not read-only."""
    services = read("compose.yaml")["services"]
    serve, keys = services["serve"], services["keys"]
    settings = config()
    program, command, file = keys["entrypoint"]
    assert (program, command, file) == ("deltune", "serve-key", settings.http.keys)
    assert keys["image"] == serve["image"] and "user" not in {*keys, *serve} and keys["profiles"]
    (volume,) = keys["volumes"]
    assert f"{volume}:ro" in serve["volumes"]
    uid = re.search(r"useradd --uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert uid is not None and f"chown {uid[1]} keys" in (DEPLOY / "compose.yaml").read_text()


def test_kubernetes() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = config()
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["path"] for probe in probes.values()} <= open_paths()
    assert probes["readiness"]["path"] == "/ready" and probes["liveness"]["path"] == "/health"
    (port,) = container["ports"]
    assert port["containerPort"] == settings.http.port and service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert pod["automountServiceAccountToken"] is False
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["deltas"] == settings.deltas.folder and str(settings.http.keys).startswith(mounted["keys"])
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
    # A read-only volume has no place for the mount of another one, nor for that of a service account in /run/secrets.
    paths = [Path(path) for path in mounted.values()]
    assert not any(one != other and one.is_relative_to(other) for one in paths for other in paths)
    assert not any(path.is_relative_to(top) for path in paths for top in ("/run", "/var/run"))
    arguments = container["args"]
    typer.main.get_command(serve_app()).make_context("serve", [*arguments]).close()
    assert arguments == ["--config", "/etc/deltune/serve.yaml"]


def test_prometheus_sends_the_key_of_an_admin() -> None:
    job = read("prometheus.yaml")
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    template = deployment["spec"]["template"]
    (relabel,) = job["relabel_configs"]
    assert (
        relabel["regex"]
        == f"{template['metadata']['labels']['app']};{template['spec']['containers'][0]['ports'][0]['name']}"
    )
    assert job["metrics_path"] in open_paths() and job["authorization"]["credentials_file"]
    assert "--admin" in (DEPLOY / "prometheus.yaml").read_text()


def test_commands_in_comments_exist() -> None:
    group: Any = typer.main.get_command(app)
    commands = [
        shlex.split(match)
        for file in DEPLOY.iterdir()
        for match in re.findall(r"^#\s+deltune (.*)$", file.read_text(), re.MULTILINE)
    ]
    assert [name for name, *_ in commands] == ["serve-key"] * 2
    for name, *arguments in commands:
        group.commands[name].make_context(name, arguments).close()
