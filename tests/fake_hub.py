"""A small Hub on this machine's loopback, over real HTTP: accounts, repositories, commits, LFS,
downloads.

It keeps everything in memory and answers the requests of huggingface_hub and datasets for
pushing and loading a model, and for loading or streaming a data set, no others.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "aT0kenThatIsNotReal" * 2


@dataclass
class Repository:
    private: bool
    # name -> commits, each {"oid", "title", "files": path -> content}
    branches: dict[str, list[dict]]

    def at(self, revision: str) -> dict | None:
        """The newest commit of a branch, or the commit of that id."""
        if revision in self.branches:
            return self.branches[revision][-1]
        commits = (commit for branch in self.branches.values() for commit in branch)
        return next((commit for commit in commits if commit["oid"] == revision), None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return (self.at(revision) or self.branches["main"][-1])["files"]


@dataclass
class FakeHub:
    """`with FakeHub() as hub:` serves at `hub.url`.

    `faults` maps a part of a path to the status it answers with; of files in `cut`, connections
    end in the middle.
    """

    lfs: bool = False  # whether weights travel as LFS objects
    role: str = "write"
    faults: dict[str, int] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    silent: bool = False  # accept connections and never answer
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    user: str = "tester"

    def __enter__(self) -> "FakeHub":
        self._end = threading.Event()
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo_id: str, private: bool = False) -> Repository:
        first = {"oid": "0" * 40, "title": "initial commit", "files": {".gitattributes": b""}}
        self.repositories[repo_id] = Repository(private, {"main": [first]})
        return self.repositories[repo_id]

    def commits(self, repo_id: str, branch: str = "main") -> list[dict]:
        """Without the one that made the repository."""
        return self.repositories[repo_id].branches[branch][1:]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, body: object = None, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        headers = {
            "Content_Type": "application/json",
            "Content_Length": str(len(content)),
        } | headers
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str, message: str) -> None:
        self.answer({"error": message}, status, X_Error_Code=code, X_Error_Message=message)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def handle_any(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        body = self.read_body()
        hub.requests.append(f"{self.command} {path}")
        if hub.silent:
            hub._end.wait()
            self.close_connection = True
            return
        for part, status in hub.faults.items():
            if part in path:
                self.refuse(status, "Fault", "as set by the test")
                return
        sent = self.headers.get("Authorization")
        if sent not in (None, f"Bearer {TOKEN}") and not path.startswith("/objects/"):
            self.refuse(401, "Unauthorized", "Invalid credentials in Authorization header")
            return
        self.known = sent is not None
        for pattern, action in _ROUTES:
            if match := re.fullmatch(pattern, path):
                action(self, body, *match.groups())
                return
        self.refuse(404, "NotFound", f"no such page: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def repository(self, repo_id: str, writing: bool = False) -> Repository | None:
        """The repository; None after refusing the request because this user may not read it or
        write to it.
        """
        repository = self.hub.repositories.get(repo_id)
        mine = self.known and repo_id.startswith(f"{self.hub.user}/")
        if repository is None or (repository.private and not mine):
            self.refuse(404 if self.known else 401, "RepoNotFound", "Repository not found")
            return None
        if writing and not mine:
            self.refuse(403, "Forbidden", "you don't have the right to do that")
            return None
        return repository

    def whoami(self, body: bytes) -> None:
        if not self.known:
            self.refuse(401, "Unauthorized", "Invalid credentials in Authorization header")
            return
        token = {"accessToken": {"role": self.hub.role}}
        self.answer(
            {"type": "user", "name": self.hub.user, "orgs": [{"name": "club"}], "auth": token}
        )

    def validate_card(self, body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        order = json.loads(body)
        owner = order.get("organization") or self.hub.user
        repo_id = f"{owner}/{order['name']}"
        if not self.known or owner != self.hub.user:
            self.refuse(403, "Forbidden", "you have no rights to create a model there")
        elif repo_id in self.hub.repositories:
            # create_repo reads the address
            self.answer({"error": "it exists", "url": f"{self.hub.url}/{repo_id}"}, 409)
        else:
            self.hub.add(repo_id, order.get("visibility") == "private")
            self.answer({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def info(self, body: bytes, repo_id: str, revision: str | None) -> None:
        repository = self.repository(repo_id)
        if repository is None:
            return
        commit = repository.at(revision or "main")
        if commit is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = [{"rfilename": name, "size": len(data)} for name, data in commit["files"].items()]
        facts = {"id": repo_id, "sha": commit["oid"], "private": repository.private}
        self.answer(facts | {"siblings": files})

    def branch(self, body: bytes, repo_id: str, branch: str) -> None:
        repository = self.repository(repo_id, writing=True)
        if repository is None:
            return
        if branch in repository.branches:
            self.refuse(409, "Conflict", "Reference already exists")
            return
        repository.branches[branch] = list(repository.branches["main"])
        self.answer()

    def squash(self, body: bytes, repo_id: str, branch: str) -> None:
        repository = self.repository(repo_id, writing=True)
        if repository is not None:
            del repository.branches[branch][:-1]
            self.answer()

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        repository = self.repository(repo_id, writing=True)
        if repository is None:
            return
        files = repository.files(revision)
        modes = []
        for name in (file["path"] for file in json.loads(body)["files"]):
            is_lfs = self.hub.lfs and name.endswith(".safetensors")
            oid = _oid(files[name], is_lfs) if name in files else None
            mode = {"path": name, "uploadMode": "lfs" if is_lfs else "regular"}
            modes.append(mode | {"shouldIgnore": False, "oid": oid})
        self.answer({"files": modes})

    def batch(self, body: bytes, repo_id: str) -> None:
        if self.repository(repo_id, writing=True) is None:
            return
        objects = []
        for one in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}", "header": {}}}
            known = one["oid"] in self.hub.objects
            objects.append(
                {"oid": one["oid"], "size": one["size"]} | ({} if known else {"actions": upload})
            )
        self.answer({"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self.refuse(400, "BadRequest", "checksum mismatch")
            return
        self.hub.objects[oid] = body
        self.answer()

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        repository = self.repository(repo_id, writing=True)
        if repository is None:
            return
        if revision not in repository.branches:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = dict(repository.files(revision))
        title = ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile" and revision != "main":
                del files[value["path"]]
            else:
                raise AssertionError(f"a push must not {line['key']}")
        oid = hashlib.sha1(
            f"{len(repository.branches[revision])} {title}".encode() + body
        ).hexdigest()
        repository.branches[revision].append({"oid": oid, "title": title, "files": files})
        url = f"{self.hub.url}/{repo_id}/commit/{oid}"
        self.answer({"commitOid": oid, "commitUrl": url, "success": True})

    def download(self, body: bytes, repo_id: str, revision: str, name: str) -> None:
        repository = self.repository(repo_id)
        if repository is None:
            return
        head = repository.at(revision)
        if name not in head["files"]:
            self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=head["oid"])
            return
        content = head["files"][name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": head["oid"]}
        headers["Content_Type"] = "application/octet-stream"
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status = 206 if wanted else 200
        if wanted:
            first = int(wanted[1])
            last = min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        if name in self.hub.cut and self.command == "GET":
            headers["Content_Length"] = str(len(content))
            content = content[: len(content) // 2]
            self.close_connection = True
        self.answer(content, status, **headers)

    def tree(self, body: bytes, repo_id: str, revision: str, folder: str | None = None) -> None:
        repository = self.repository(repo_id)
        if repository is None:
            return
        files = repository.files(revision)
        rows = {}
        start = f"{folder}/" if folder else ""
        recursive = (
            parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        )
        for name in (name for name in files if name.startswith(start)):
            parts = name.removeprefix(start).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                path = start + "/".join(parts[:depth])
                rows[path] = {
                    "type": "directory",
                    "path": path,
                    "size": 0,
                    "oid": _oid(path.encode(), False),
                }
            if recursive or len(parts) == 1:
                rows[name] = _file_row(name, files[name])
        self.answer(json.dumps(list(rows.values())).encode(), 200 if rows or not start else 404)

    def paths_info(self, body: bytes, repo_id: str, revision: str) -> None:
        repository = self.repository(repo_id)
        if repository is not None:
            files = repository.files(revision)
            paths = parse_qs(body.decode())["paths"]
            rows = [_file_row(path, files[path]) for path in paths if path in files]
            self.answer(json.dumps(rows).encode())


def _file_row(path: str, content: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(content), "oid": _oid(content, False)}


def _oid(content: bytes, is_lfs: bool) -> str:
    """What git, or LFS, calls this content."""
    if is_lfs:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/validate-yaml", _Handler.validate_card),
    (r"/api/repos/create", _Handler.create),
    (rf"/api/models/{_REPO}(?:/revision/(.+))?", _Handler.info),
    (rf"/api/models/{_REPO}/branch/(.+)", _Handler.branch),
    (rf"/api/models/{_REPO}/super-squash/(.+)", _Handler.squash),
    (rf"/api/models/{_REPO}/preupload/(.+)", _Handler.preupload),
    (rf"/api/models/{_REPO}/commit/(.+)", _Handler.commit),
    (rf"/api/models/{_REPO}/tree/([^/]+)", _Handler.tree),
    (rf"/api/datasets/{_REPO}(?:/revision/(.+))?", _Handler.info),
    (rf"/api/datasets/{_REPO}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    (rf"/api/datasets/{_REPO}/paths-info/(.+)", _Handler.paths_info),
    (rf"(?:/datasets)?/{_REPO}/resolve/([^/]+)/(.+)", _Handler.download),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/objects/(\w+)", _Handler.upload),
]
