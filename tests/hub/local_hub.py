"""
A server that speaks as much of the Hub's protocol as publishing and loading need: repositories, branches, plain LFS
(single and multipart), commits, downloads. Clients use it through HF_ENDPOINT and know no difference.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


TOKEN, OWNER = "hf_local", "you"
AUTHORIZED = ("whoami", "create", "branch", "preupload", "commit", "batch")
LARGE = (".safetensors", ".png", ".bin")  # what the Hub's default .gitattributes sends through LFS


@dataclass
class Repository:
    """Branches by name, each a commit id; commits by id, each the content of all files."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        self.messages.append(message)
        sha = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class LocalHub:
    """
    Args:
        part_size (`int`): Objects larger than this are uploaded in parts of this size.

    Attributes:
        repositories (`dict[str, Repository]`): By id.
        objects (`dict[str, bytes]`): Large files by sha256.
        received (`list[tuple[str, str]]`): Method and path of each request.
        refusals (`list[str]`): Regular expressions; the next request whose method and path match the first of them is
            refused, and the expression is used up.
        forbidden (`set[str]`): Owners in whose name nothing can be created.
        hold (`str`, *optional*): Requests that match are never answered, and `held` is set.
    """

    def __init__(self, part_size: int = 40_000) -> None:
        self.part_size = part_size
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.received: list[tuple[str, str]] = []
        self.refusals: list[str] = []
        self.hold: str | None = None
        self.forbidden: set[str] = set()
        self.held = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "LocalHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        repository = self.repositories[repo_id]
        return repository.commits[repository.at(revision)]

    def count(self, pattern: str) -> int:
        return sum(bool(re.fullmatch(pattern, f"{method} {path}")) for method, path in self.received)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: LocalHub

    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/models/([^/]+/[^/]+)/branch/(.+)", "branch"),
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/(.+)", "preupload"),
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/(.+)", "commit"),
        ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", "tree"),
        ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", "info"),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/lfs/(\w+)(?:/(\d+))?", "put"),
        ("POST", r"/lfs/(\w+)/complete", "complete"),
        ("POST", r"/lfs/verify", "verify"),
        ("GET|HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    )

    def answer_request(self) -> None:
        url = urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.received.append((self.command, path))
        if self.hub.hold and re.fullmatch(self.hub.hold, f"{self.command} {path}"):
            self.hub.held.set()
            self.close_connection = True
            self.rfile.read(1)  # until the client is gone
            return
        if self.hub.refusals and re.fullmatch(self.hub.refusals[0], f"{self.command} {path}"):
            self.hub.refusals.pop(0)
            self.send(400, {"error": "refused for the test"})
            return
        for methods, pattern, name in self.ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in methods.split("|"):
                if name in AUTHORIZED and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.send(401, {"error": "Invalid credentials in Authorization header"})
                else:
                    getattr(self, name)(body, *found.groups())
                return
        self.send(404, {"error": f"{self.command} {path} is not spoken here"})

    do_GET = do_HEAD = do_POST = do_PUT = answer_request  # noqa: N815

    def send(self, status: int, value: object = None, **headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, header in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, what: str) -> None:
        self.send(404, {"error": what}, X_Error_Code=what, X_Error_Message=what)

    def log_message(self, *args: object) -> None:
        pass

    # ------------------------------------------------------------------ repositories

    def whoami(self, body: bytes) -> None:
        self.send(200, {"type": "user", "name": OWNER, "orgs": []})

    def validate(self, body: bytes) -> None:
        """The documented rules of a card's metadata that text alone can break."""
        found = re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)
        data = yaml.safe_load(found[1]) if found else None
        errors = [] if isinstance(data, dict) else ["the metadata is no mapping"]
        for model in (data or {}).get("model-index") or []:
            for result in model["results"]:
                errors += [] if result["task"]["type"] and result["dataset"]["type"] else ["a result misses a type"]
        self.send(400 if errors else 200, {"errors": [{"message": error} for error in errors], "warnings": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked['organization'] or OWNER}/{asked['name']}"
        if asked["organization"] in self.hub.forbidden:
            self.send(403, {"error": "You don't have the rights to create a model under this namespace"})
            return
        answer = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repositories:
            self.send(409, answer | {"error": "You already created this model repo"})
            return
        repository = Repository(private=asked.get("visibility") == "private")
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.hub.repositories[repo_id] = repository
        self.send(200, answer)

    def branch(self, body: bytes, repo_id: str, name: str) -> None:
        repository = self.hub.repositories[repo_id]
        if name in repository.branches:
            self.send(409, {"error": "Reference already exists"})
            return
        repository.branches[name] = repository.branches["main"]
        self.send(200, {})

    def info(self, body: bytes, repo_id: str, revision: str | None) -> None:
        repository = self.hub.repositories.get(repo_id)
        sha = repository and repository.at(revision or "main")
        if sha is None:
            self.refuse("RepoNotFound" if repository is None else "RevisionNotFound")
            return
        siblings = [{"rfilename": name} for name in sorted(repository.commits[sha])]
        found = {"id": repo_id, "modelId": repo_id, "sha": sha, "private": repository.private, "siblings": siblings}
        self.send(200, found | {"tags": [], "downloads": 0, "likes": 0})

    def tree(self, body: bytes, repo_id: str, revision: str) -> None:
        repository = self.hub.repositories.get(repo_id)
        sha = repository and repository.at(revision)
        if sha is None:
            self.refuse("RepoNotFound" if repository is None else "RevisionNotFound")
            return
        self.send(
            200,
            [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in sorted(repository.commits[sha].items())
            ],
        )

    # ------------------------------------------------------------------ uploads

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        files = json.loads(body)["files"]
        modes = {file["path"]: "lfs" if file["path"].endswith(LARGE) else "regular" for file in files}
        answer = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
        self.send(200, {"files": answer})

    def batch(self, body: bytes, repo_id: str) -> None:
        objects = [self.instructions(each["oid"], each["size"]) for each in json.loads(body)["objects"]]
        self.send(200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")

    def instructions(self, oid: str, size: int) -> dict:
        if oid in self.hub.objects:
            return {"oid": oid, "size": size}
        place = f"{self.hub.endpoint}/lfs/{oid}"
        upload: dict = {"href": place}
        if size > self.hub.part_size:
            parts = range(1, -(-size // self.hub.part_size) + 1)
            header = {"chunk_size": str(self.hub.part_size)} | {str(n): f"{place}/{n}" for n in parts}
            upload = {"href": f"{place}/complete", "header": header}
        verify = {"href": f"{self.hub.endpoint}/lfs/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def put(self, body: bytes, oid: str, part: str | None) -> None:
        if part is not None:
            self.hub.parts.setdefault(oid, {})[int(part)] = body
            self.send(200, b"", ETag=f'"{hashlib.md5(body).hexdigest()}"')
        else:
            self.store(oid, body)

    def complete(self, body: bytes, oid: str) -> None:
        parts = self.hub.parts.pop(oid)
        self.store(oid, b"".join(parts[part["partNumber"]] for part in json.loads(body)["parts"]))

    def store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            self.send(400, {"error": "Content does not match its sha256"})
            return
        self.hub.objects[oid] = content
        self.send(200, b"")

    def verify(self, body: bytes) -> None:
        asked = json.loads(body)
        stored = self.hub.objects.get(asked["oid"])
        self.send(200 if stored is not None and len(stored) == asked["size"] else 404, {})

    def commit(self, body: bytes, repo_id: str, branch: str) -> None:
        repository, lines = self.hub.repositories[repo_id], [json.loads(line) for line in body.splitlines()]
        if repository.at(branch) is None:
            self.refuse("RevisionNotFound")
            return
        files = dict(repository.commits[repository.at(branch)])
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
                repository.large.add(value["path"])
        answer = {}
        if "create_pr" in self.query:
            branch = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in repository.branches)}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo_id}/discussions/{branch.split('/')[-1]}"
        sha = repository.commit(branch, files, lines[0]["value"]["summary"])
        self.send(200, answer | {"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{sha}", "commitOid": sha})

    # ------------------------------------------------------------------ downloads

    def resolve(self, body: bytes, repo_id: str, revision: str, name: str) -> None:
        repository = self.hub.repositories.get(repo_id)
        allowed = repository and (not repository.private or self.headers.get("Authorization") == f"Bearer {TOKEN}")
        if not allowed:
            self.refuse("RepoNotFound")
            return
        sha = repository.at(revision)
        if sha is None:
            self.refuse("RevisionNotFound")
            return
        content = repository.commits[sha].get(name)
        if content is None:
            self.send(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
            return
        if name in repository.large:
            etag = hashlib.sha256(content).hexdigest()
            extra = {"X_Linked_Size": str(len(content)), "X_Linked_ETag": f'"{etag}"'}
        else:
            etag, extra = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), {}
        self.send(200, content, ETag=f'"{etag}"', X_Repo_Commit=sha, Accept_Ranges="none", **extra)
