"""A local stand-in of the Hugging Face Hub's HTTP API, for the real client of huggingface_hub on the other side.

It keeps repositories of models with branches, commits and pull requests in memory: large files by LFS, small ones in
the commit, private repositories, tokens with and without the right to write, and the hub's own error codes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

WRITER, READER = "hf_of_a_writer", "hf_of_a_reader"
"""Tokens of somebody who may write everywhere, and of somebody who sees what is public only."""


@dataclass
class Repository:
    """A repository: its commits, each with all of its files, and what its branches point to."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], ref: str, message: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {message} {sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.refs[ref], self.messages[sha] = files, sha, message
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.refs[revision]]


@dataclass
class Hub:
    """The stand-in.

    Attributes:
        endpoint: Its address.
        repositories: The repositories by their ids.
        requests: Every request, as "METHOD /path".
        large: Names that end so are uploaded by LFS.
    """

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    large: tuple[str, ...] = (".safetensors",)

    def add(self, repo_id: str, files: dict[str, bytes], private: bool = False) -> Repository:
        """Put a repository on the hub as somebody else would."""
        self.repositories[repo_id] = repository = Repository(private)
        repository.commit(files, "main", "Upload")
        return repository

    def downloaded(self) -> set[str]:
        """The names of all files of repositories of which the content was sent."""
        return {m[1] for r in self.requests if (m := re.fullmatch(r"GET /[^/]+/[^/]+/resolve/[^/]+/(.*)", r))}


class Answer(Exception):
    """An answer that ends the handling of a request."""

    def __init__(self, status: int, body: Any = b"", **headers: str) -> None:
        super().__init__(status)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


def refusal(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("do_GET", "do_HEAD", "do_POST", "do_PUT"):
            return self.handle_request
        raise AttributeError(name)

    def handle_request(self) -> None:
        split = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {unquote(split.path)}")
        self.data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.query = parse_qs(split.query)
        try:
            for method, pattern, answer in ROUTES:
                if self.command in method.split() and (match := re.fullmatch(pattern, split.path)):
                    answer(self, *(unquote(group) for group in match.groups()))
            raise Answer(404, {"error": f"the stand-in has no {self.command} {self.path}"})
        except Answer as end:
            self.send_response(end.status)
            for name, value in end.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in end.headers:
                self.send_header("Content-Length", str(len(end.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(end.body)

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def writes(self) -> None:
        if self.token != WRITER:
            raise Answer(401 if self.token is None else 403, {"error": "You have no right to write here"})

    def repository(self, repo_id: str) -> Repository:
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and self.token != WRITER):
            raise refusal(401 if self.token is None else 404, "RepoNotFound", "Repository not found")
        return repository

    def commit(self, repo_id: str, revision: str) -> tuple[Repository, str]:
        repository = self.repository(repo_id)
        sha = repository.resolve(revision)
        if sha is None:
            raise refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, sha

    def create(self) -> None:
        self.writes()
        body = json.loads(self.data)
        repo_id = f"{body['organization'] or 'writer'}/{body['name']}"
        if repo_id in self.hub.repositories:
            raise Answer(409, {"error": "You already created this model repo", "url": f"{self.hub.endpoint}/{repo_id}"})
        self.hub.add(repo_id, {".gitattributes": b""}, body.get("visibility") == "private")
        raise Answer(200, {"url": f"{self.hub.endpoint}/{repo_id}"})

    def branch(self, repo_id: str, name: str) -> None:
        self.writes()
        repository = self.repository(repo_id)
        if name in repository.refs:
            raise Answer(409, {"error": f"Reference already exists: {name}"})
        repository.refs[name] = repository.refs["main"]
        raise Answer(201, {})

    def info(self, repo_id: str, revision: str = "main") -> None:
        repository, sha = self.commit(repo_id, revision)
        siblings = [{"rfilename": name} for name in repository.commits[sha]]
        raise Answer(200, {"id": repo_id, "sha": sha, "private": repository.private, "siblings": siblings})

    def tree(self, repo_id: str, revision: str) -> None:
        repository, sha = self.commit(repo_id, revision)
        raise Answer(200, [self.entry(name, data) for name, data in repository.commits[sha].items()])

    def entry(self, name: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(data), "oid": git_oid(data)}
        if name.endswith(self.hub.large):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def resolve(self, repo_id: str, revision: str, name: str) -> None:
        repository, sha = self.commit(repo_id, revision)
        data = repository.commits[sha].get(name)
        if data is None:
            raise refusal(404, "EntryNotFound", "Entry not found")
        etag = hashlib.sha256(data).hexdigest() if name.endswith(self.hub.large) else git_oid(data)
        raise Answer(200, data, ETag=f'"{etag}"', X_Repo_Commit=sha, Content_Length=str(len(data)))

    def validate(self) -> None:
        _, metadata, _ = json.loads(self.data)["content"].split("---\n", 2)
        base = yaml.safe_load(metadata).get("base_model", "a/b")
        if not re.fullmatch(r"(?:[\w.-]+/)?[\w.-]+", base):
            raise Answer(400, {"errors": [{"message": '"base_model" is no model id'}], "warnings": []})
        raise Answer(200, {"errors": [], "warnings": []})

    def preupload(self, repo_id: str, revision: str) -> None:
        self.writes()
        self.commit(repo_id, revision)
        names = [file["path"] for file in json.loads(self.data)["files"]]
        modes = ["lfs" if name.endswith(self.hub.large) else "regular" for name in names]
        raise Answer(
            200,
            {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, modes, strict=True)]},
        )

    def batch(self, repo_id: str) -> None:
        self.writes()
        self.repository(repo_id)
        objects = json.loads(self.data)["objects"]
        upload = [{**o, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{o['oid']}"}}} for o in objects]
        raise Answer(200, {"transfer": "basic", "objects": upload}, Content_Type="application/vnd.git-lfs+json")

    def upload(self, oid: str) -> None:
        assert hashlib.sha256(self.data).hexdigest() == oid
        self.hub.objects[oid] = self.data
        raise Answer(200)

    def post_commit(self, repo_id: str, revision: str) -> None:
        self.writes()
        repository, sha = self.commit(repo_id, revision)
        files, message = dict(repository.commits[sha]), ""
        for line in self.data.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                message = f"{value['summary']}\n{value['description']}".strip()
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert key == "lfsFile", key
                files[value["path"]] = self.hub.objects[value["oid"]]
        answer = {}
        if "create_pr" in self.query:
            number = sum(ref.startswith("refs/pr/") for ref in repository.refs) + 1
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo_id}/discussions/{number}"
        new = repository.commit(files, revision, message)
        raise Answer(200, {"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{new}", "commitOid": new, **answer})


def git_oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


ID, PART = "([^/]+/[^/]+)", "([^/]+)"
ROUTES: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("POST", "/api/repos/create", Handler.create),
    ("POST", f"/api/models/{ID}/branch/{PART}", Handler.branch),
    ("GET", f"/api/models/{ID}", Handler.info),
    ("GET", f"/api/models/{ID}/revision/{PART}", Handler.info),
    ("GET", f"/api/models/{ID}/tree/{PART}", Handler.tree),
    ("GET HEAD", f"/{ID}/resolve/{PART}/(.+)", Handler.resolve),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{ID}/preupload/{PART}", Handler.preupload),
    ("POST", rf"/{ID}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", f"/lfs/{PART}", Handler.upload),
    ("POST", f"/api/models/{ID}/commit/{PART}", Handler.post_commit),
)


@contextmanager
def running() -> Iterator[Hub]:
    """The stand-in, listening on a local port until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
