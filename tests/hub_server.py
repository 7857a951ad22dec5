"""A small server that speaks as much of the Hub's HTTP API as pushing and loading a model needs.

It keeps everything in memory, serves `huggingface_hub` unchanged through `HF_ENDPOINT`, and lets a test look inside:

    with HubServer(tokens={"hf_secret": "user"}) as hub:
        subprocess.run([...], env=os.environ | hub.environment("hf_secret"))
        hub.repos["user/name"].files()

or by hand: `python tests/hub_server.py --port 8080`.

There are self-hosted servers with this API, but none that a test could install: KohakuHub is no package on the index
and needs an object store and a data base; olah is one, but a mirror of the public Hub that takes no pushes.

It has no git, no datasets or spaces, no pages for people, and no Xet storage: clients use LFS instead, recent ones
only when `HF_HUB_DISABLE_XET` says so.
"""

import argparse
import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pkl", ".h5")


class HubError(Exception):
    """An answer that `huggingface_hub` turns into the error of that code."""

    def __init__(self, status: int, code: str, message: str, **body):
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message, **body}


class File:
    """Bytes and their identifier: what git, or LFS, would call them, which is also the ETag."""

    def __init__(self, data: bytes, lfs: bool):
        self.data, self.lfs = data, lfs
        self.oid = (hashlib.sha256(data) if lfs else hashlib.sha1(b"blob %d\0" % len(data) + data)).hexdigest()

    def info(self, path: str) -> dict:
        info = {"type": "file", "path": path, "size": len(self.data), "oid": self.oid}
        return info | {"lfs": {"oid": self.oid, "size": len(self.data), "pointerSize": 134}} if self.lfs else info


class Repo:
    """Commits, each a whole {path: File}, and the branches that point at them."""

    def __init__(self, name: str, private: bool):
        self.name, self.private = name, private
        self.commits, self.messages, self.branches = {}, [], {}
        self.commit("main", {".gitattributes": File(b"*.safetensors filter=lfs\n", False)}, "initial commit")

    def commit(self, branch: str, files: dict[str, File], message: str) -> str:
        listing = "".join(f"{path} {file.oid}\n" for path, file in sorted(files.items()))
        sha = hashlib.sha1(f"{len(self.commits)} {message}\n{listing}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The repository's files at a revision, by path."""
        return {path: file.data for path, file in self.commits[self.resolve(revision)].items()}


class HubServer(ThreadingHTTPServer):
    """Serves from a thread of its own as long as the `with` block lasts."""

    daemon_threads = True

    def __init__(self, tokens: dict[str, str], port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.tokens = tokens
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def environment(self, token: str | None = None) -> dict[str, str]:
        """Variables for a process that is to take this server for the Hub."""
        variables = {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        variables |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
        return variables | ({"HF_TOKEN": token} if token else {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"})


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = []


def route(methods: str, pattern: str):
    def add(function):
        ROUTES.append((methods.split(), re.compile(pattern + "$"), function))
        return function

    return add


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def handle_any(self):
        self.url = urlsplit(self.path)
        self.query = parse_qs(self.url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.url.path}")
        try:
            with self.server.lock:
                for methods, pattern, function in ROUTES:
                    if self.command in methods and (match := pattern.match(self.url.path)):
                        groups = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                        return function(self, **groups)
            raise HubError(404, "", f"this server has no {self.command} {self.url.path}")
        except HubError as error:
            self.send(error.status, error.body, {"X-Error-Code": error.code, "X-Error-Message": str(error)})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def log_message(self, *args):
        pass

    def send(self, status: int, content: bytes | dict | list, headers: dict[str, str] | None = None):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers = {"Content-Type": "application/json"} | (headers or {})
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def user(self) -> str | None:
        return self.server.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def repo(self, name: str, write: bool = False) -> Repo:
        repo = self.server.repos.get(name)
        # As the Hub does, a repository that one may not see is answered like one that is not there.
        if repo is None or (repo.private and self.user() != name.split("/")[0]):
            raise HubError(404 if self.user() else 401, "RepoNotFound", "Repository not found")
        if write and self.user() != name.split("/")[0]:
            raise HubError(403 if self.user() else 401, "", f"You have no rights to write to {name}")
        return repo


@route("GET", "/api/whoami-v2")
def whoami(request: Handler):
    if request.user() is None:
        raise HubError(401, "", "Invalid credentials in Authorization header")
    request.send(200, {"type": "user", "name": request.user(), "orgs": [], "auth": {"type": "access_token"}})


@route("POST", "/api/repos/create")
def create_repo(request: Handler):
    asked = json.loads(request.body)
    name = f"{asked.get('organization') or request.user()}/{asked['name']}"
    if request.user() is None or request.user() != name.split("/")[0]:
        raise HubError(403 if request.user() else 401, "", f"You have no rights to create {name}")
    url = f"{request.server.endpoint}/{name}"
    if name in request.server.repos:
        raise HubError(409, "", "You already created this model repo", url=url)
    private = asked.get("visibility") == "private" or asked.get("private") is True
    request.server.repos[name] = Repo(name, private)
    request.send(200, {"url": url, "name": name, "id": name})


@route("POST", "/api/validate-yaml")
def validate_yaml(request: Handler):
    metadata = re.match(r"---\s*\n(.*?)\n---", json.loads(request.body)["content"], re.DOTALL)
    if metadata is None:
        return request.send(200, {"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]})
    try:
        valid = isinstance(yaml.safe_load(metadata[1]), dict)
    except yaml.YAMLError:
        valid = False
    errors = [] if valid else [{"message": "the metadata is no YAML mapping"}]
    request.send(200 if valid else 400, {"errors": errors, "warnings": []})


@route("GET", f"/api/models/{REPO}(/revision/(?P<revision>.+))?")
def repo_info(request: Handler, repo: str, revision: str):
    repo = request.repo(repo)
    sha = repo.resolve(revision or "main")
    info = {"_id": repo.name, "id": repo.name, "sha": sha, "private": repo.private, "tags": [], "downloads": 0}
    request.send(200, info | {"siblings": [{"rfilename": path} for path in repo.commits[sha]]})


@route("GET", f"/api/models/{REPO}/refs")
def refs(request: Handler, repo: str):
    branches = request.repo(repo).branches.items()
    heads = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in branches]
    request.send(200, {"branches": heads, "converts": [], "tags": [], "pullRequests": []})


@route("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?")
def tree(request: Handler, repo: str, revision: str, folder: str):
    repo = request.repo(repo)
    files = repo.commits[repo.resolve(revision)].items()
    # Files alone, at any depth: what asks here wants to know which files there are.
    request.send(200, [file.info(path) for path, file in files if f"{path}/".startswith(folder)])


@route("POST", f"/api/models/{REPO}/paths-info/(?P<revision>[^/]+)")
def paths_info(request: Handler, repo: str, revision: str):
    repo = request.repo(repo)
    files = repo.commits[repo.resolve(revision)]
    paths = parse_qs(request.body.decode()).get("paths", [])
    request.send(200, [files[path].info(path) for path in paths if path in files])


@route("POST", f"/api/models/{REPO}/branch/(?P<branch>.+)")
def create_branch(request: Handler, repo: str, branch: str):
    repo = request.repo(repo, write=True)
    if branch in repo.branches:
        raise HubError(409, "", f"Reference already exists: {branch}")
    start = json.loads(request.body or b"{}").get("startingPoint", "main")
    repo.branches[branch] = repo.resolve(start)
    request.send(200, {})


@route("POST", f"/api/models/{REPO}/preupload/(?P<revision>[^/]+)")
def preupload(request: Handler, repo: str, revision: str):
    repo = request.repo(repo, write=True)
    known = repo.commits[repo.resolve(revision)]
    answers = []
    for file in json.loads(request.body)["files"]:
        mode = "lfs" if file["path"].endswith(LFS_SUFFIXES) or file["size"] > 10 * 2**20 else "regular"
        oid = known[file["path"]].oid if file["path"] in known else None
        answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    request.send(200, {"files": answers})


@route("POST", f"/{REPO}.git/info/lfs/objects/batch")
def lfs_batch(request: Handler, repo: str):
    request.repo(repo, write=True)
    objects = []
    for wanted in json.loads(request.body)["objects"]:
        href = f"{request.server.endpoint}/lfs/{wanted['oid']}"
        upload = {} if wanted["oid"] in request.server.lfs else {"actions": {"upload": {"href": href}}}
        objects.append({"oid": wanted["oid"], "size": wanted["size"]} | upload)
    request.send(200, {"transfer": "basic", "objects": objects})


@route("PUT", "/lfs/(?P<oid>[0-9a-f]{64})")
def lfs_put(request: Handler, oid: str):
    if hashlib.sha256(request.body).hexdigest() != oid:
        raise HubError(400, "", f"what was uploaded is not {oid}")
    request.server.lfs[oid] = request.body
    request.send(200, {})


@route("POST", f"/api/models/{REPO}/commit/(?P<revision>[^/]+)")
def commit(request: Handler, repo: str, revision: str):
    repo = request.repo(repo, write=True)
    files, header = dict(repo.commits[repo.resolve(revision)]), {}
    for line in request.body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        match operation["key"]:
            case "header":
                header = value
            case "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
            case "lfsFile":
                if value["oid"] not in request.server.lfs:
                    raise HubError(400, "", f"{value['path']}: its LFS object was never uploaded")
                files[value["path"]] = File(request.server.lfs[value["oid"]], lfs=True)
            case "deletedFile" | "deletedFolder":
                gone = value["path"].rstrip("/")
                files = {path: file for path, file in files.items() if not f"{path}/".startswith(f"{gone}/")}
            case other:
                raise HubError(400, "", f"unknown operation {other}")
    pull_request = None
    if "create_pr" in request.query:
        number = sum(name.startswith("refs/pr/") for name in repo.branches) + 1
        revision, pull_request = f"refs/pr/{number}", f"{request.server.endpoint}/{repo.name}/discussions/{number}"
    sha = repo.commit(revision, files, header.get("summary", ""))
    url = f"{request.server.endpoint}/{repo.name}/commit/{sha}"
    request.send(200, {"success": True, "commitOid": sha, "commitUrl": url, "pullRequestUrl": pull_request})


@route("GET HEAD", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(request: Handler, repo: str, revision: str, path: str):
    repo = request.repo(repo)
    sha = repo.resolve(revision)
    if path not in repo.commits[sha]:
        # The client remembers per commit that a file is not there.
        error = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": sha}
        return request.send(404, {"error": "Entry not found"}, error)
    file = repo.commits[sha][path]
    request.send(200, file.data, {"ETag": f'"{file.oid}"', "X-Repo-Commit": sha})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve an empty Hub on loopback until interrupted.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default="hf_token")
    parser.add_argument("--user", default="user")
    arguments = parser.parse_args()
    with HubServer({arguments.token: arguments.user}, arguments.port) as hub:
        print(
            "\n".join(f"export {name}={value}" for name, value in hub.environment(arguments.token).items()), flush=True
        )
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
