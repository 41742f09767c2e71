"""A model folder to the Hub, in one commit: all of it arrives or nothing does."""

import contextlib
import fnmatch
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import safetensors
import yaml
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import get_session

from nanogpt_hf.errors import RunFolderError, UserError
from nanogpt_hf.runs.redact import holds_token, redact, redact_tree

PATH_PLACEHOLDER = "path/to/this/folder"  # where a card's example loads from; a push replaces it by the repository
CARD = "README.md"
_WEIGHTS = ("*.safetensors", "*.gguf", "*.onnx", "*.onnx.data")
_ANY_WEIGHTS = (*_WEIGHTS, "*.bin", "*.index.json")
# Only what is known to belong to a model goes: a folder may hold anything else, secrets and pickles too.
_FILES = (
    *_WEIGHTS,
    CARD,
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "LICENSE*",
)
_PATIENCE = 120.0  # seconds of silence before a connection is given up; huggingface_hub itself would wait for ever


@dataclass(frozen=True)
class Pushed:
    """What went to the Hub."""

    url: str  # of the commit
    files: list[str]
    size: int  # bytes
    skipped: list[str]  # files of the folder that are none of a model's
    stale_weights: list[str]  # weights in the repository that are not of this push
    repo_created: bool  # whether the repository was made
    changed: bool  # whether there was anything to commit


def check_login(repo_id: str, patience: float = 10.0) -> str | None:
    """Whether a push to `repo_id` may work, before a run counts on it.

    Raises UserError where it cannot: no token, a wrong one, somebody else's repository. Returns a line where the Hub
    does not answer, which need not last.
    """
    session = get_session()
    before, session.timeout = session.timeout, patience
    try:
        _login(repo_id)
    except Exception as error:
        if isinstance(error, UserError) or _status(error) in (401, 403):
            raise UserError(f"hub.repo: {repo_id}: {_reason(error)}; nothing was started") from error
        return f"hub.repo: {repo_id}: {_reason(error)}; training goes on, and each push tries again"
    finally:
        session.timeout = before
    return None


def push(
    folder: Path,
    repo_id: str,
    *,
    extra: tuple[Path, ...] = (),
    minimal_card: str | None = None,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> Pushed:
    """Push a model folder, and `extra` files beside it, to the model repository `repo_id` (user/name).

    `minimal_card` is the model card for a folder without one. A missing repository or branch `revision` is created;
    nothing is ever deleted. Raises UserError if there is no login, permission, network or model, and, before anything
    is created or sent and one line each, for files whose content does not match their name, that hold a token or a
    private key, or that are links out of the folder.
    """
    created, sending = "", False  # what a failure leaves on the Hub
    huggingface_hub.utils.logging.set_verbosity_error()  # it would tell of every retry
    try:
        get_session().timeout = _PATIENCE
        token = _login(repo_id)
        if holds_token((message or "").encode(), token):
            raise UserError("--message: holds a token of the Hub or a private key; take it out first")
        with _staged(folder, extra, minimal_card, repo_id, revision, token) as (stage, skipped):
            files = sorted(path.name for path in stage.iterdir())
            api = HfApi(token=token)
            if not _exists(api, repo_id, private):
                api.create_repo(repo_id, private=private or None)
                created = f"; the repository {repo_id} was made and is empty"
            if revision and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            before = api.repo_info(repo_id, revision=revision)
            sending = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the Hub's remarks on a card's metadata
                commit = api.create_commit(
                    repo_id,
                    [CommitOperationAdd(name, stage / name) for name in files],
                    commit_message=message or f"Push {folder.resolve().name} with nanogpt_hf",
                    revision=revision,
                )
            size = sum((stage / name).stat().st_size for name in files)
    except RunFolderError as error:
        raise RunFolderError(f"{error}; nothing was pushed") from error
    except Exception as error:  # of the network, the Hub, the storage behind it, ...
        state = f"nothing was pushed{created}"
        if sending and _is_network(error):
            state = f"a push is one commit, so all of it arrived or nothing: see {constants.ENDPOINT}/{repo_id}"
        raise UserError(f"{repo_id}: {_reason(error)}; {state}") from error
    names_before = [file.rfilename for file in before.siblings or ()]
    return Pushed(
        url=commit.commit_url,
        files=files,
        size=size,
        skipped=skipped,
        stale_weights=[name for name in names_before if _matches(name, _ANY_WEIGHTS) and name not in files],
        repo_created=bool(created),
        changed=commit.oid != before.sha,
    )


def _login(repo_id: str) -> str:
    """The token of who is logged in. Raises UserError where nobody is, or `repo_id` is not theirs to write."""
    token = get_token()
    if token is None:
        raise UserError("not logged in to the Hub; run `hf auth login`, or set HF_TOKEN to a token with write access")
    account = HfApi(token=token).whoami()
    name = account["name"]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"the token of {name} may only read; make one with write access and log in with it")
    owner = repo_id.partition("/")[0]
    theirs = [name, *(organization["name"] for organization in account.get("orgs", []))]
    if owner.lower() not in map(str.lower, theirs):
        may = ", ".join(f"{one}/..." for one in theirs)
        raise UserError(f"{owner} is somebody else's name; you are logged in as {name} and may push to {may}")
    return token


def _exists(api: HfApi, repo_id: str, private: bool) -> bool:
    """Whether the repository is there. Raises UserError where it is public and must not be."""
    try:
        info = api.repo_info(repo_id)
    except RepositoryNotFoundError:
        return False
    if private and not info.private:
        raise UserError("it exists and is public; make it private in its settings, or do not ask for a private one")
    return True


@contextlib.contextmanager
def _staged(
    folder: Path, extra: tuple[Path, ...], minimal_card: str | None, repo_id: str, revision: str | None, token: str
) -> Iterator[tuple[Path, list[str]]]:
    """A hidden folder with the files as they go, and what of `folder` does not.

    A training run may replace its model folder at any moment; what was gathered stays as it is.
    """
    stage = staging_folder(folder, os.getpid())
    try:
        try:
            stage.mkdir()
        except OSError:  # the model lies where nothing may be written
            stage = Path(tempfile.mkdtemp(prefix="push-"))
        try:
            skipped = _gather(stage, folder, extra)
            _check_content(stage, folder, token)
            _address(stage, minimal_card, repo_id, revision)
        except OSError as error:
            raise RunFolderError(f"{folder}: cannot be read or copied: {error.strerror or error}") from error
        yield stage, skipped
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def staging_folder(folder: Path, process: int) -> Path:
    """Where the push of process number `process` gathers what it sends."""
    return folder.parent / f".push-{process}"


def _gather(stage: Path, folder: Path, extra: tuple[Path, ...]) -> list[str]:
    """Link or copy what is pushed into `stage`; return the names in `folder` that are not."""
    for _ in range(10):
        with contextlib.suppress(FileNotFoundError):  # replaced by a newer one just now: once more
            before, linked = folder.stat().st_ino, []
            everything = sorted(path.name for path in folder.iterdir())
            names = [name for name in everything if _matches(name, _FILES) and (folder / name).is_file()]
            if not any(_matches(name, _WEIGHTS) for name in names):
                raise RunFolderError(f"{folder}: holds no weights as safetensors, GGUF or ONNX")
            for path in [*(folder / name for name in names), *(path for path in extra if path.is_file())]:
                if not path.resolve().is_relative_to(path.parent.resolve()):
                    linked.append(f"{path}: is a link to {path.resolve()}, out of its folder; put a copy there")
                else:
                    _link_or_copy(path, stage / path.name)
            if folder.stat().st_ino == before:
                _raise_all(linked)
                return [name for name in everything if name not in names]
        for file in stage.iterdir():
            file.unlink()
    raise RunFolderError(f"{folder}: changes while it is read")


def _link_or_copy(path: Path, target: Path) -> None:
    if _matches(path.name, _WEIGHTS):
        with contextlib.suppress(OSError):  # another disk, or one that knows no links
            os.link(path.resolve(), target)  # costs nothing, and keeps the bytes when the name is gone
            return
    shutil.copyfile(path, target)


def _address(stage: Path, minimal_card: str | None, repo_id: str, revision: str | None) -> None:
    """Make the copies what others should see: a card that loads from the repository, nothing private."""
    card = stage / CARD
    if not card.exists() and minimal_card:
        card.write_text(minimal_card, encoding="utf-8")
    if card.exists():
        place = f'"{repo_id}", revision={json.dumps(revision)}' if revision else f'"{repo_id}"'
        text = card.read_text(encoding="utf-8", errors="replace").replace(f'"{PATH_PLACEHOLDER}"', place)
        card.write_text(text, encoding="utf-8")
    recipe, metrics = stage / "recipe.yaml", stage / "metrics.jsonl"
    if recipe.exists():
        recipe.write_text(redact(recipe.read_text(encoding="utf-8")), encoding="utf-8")
    for path in (stage / name for name in ("config.json", "generation_config.json", "adapter_config.json")):
        if path.exists():
            tree = json.loads(path.read_text(encoding="utf-8"))
            if (shown := redact_tree(tree)) != tree:
                path.write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
    if metrics.exists():  # a run may be writing its next line
        whole = metrics.read_bytes()
        metrics.write_bytes(whole[: whole.rfind(b"\n") + 1])


def _check_content(stage: Path, folder: Path, token: str) -> None:
    """Raises RunFolderError, a line for each, for files that are not what their name says, or hold a secret."""
    problems = []
    for path in sorted(stage.iterdir()):
        check = next((check for pattern, check in _CONTENT if fnmatch.fnmatchcase(path.name, pattern)), None)
        try:
            if check:
                check(path)
        except Exception as error:  # of the parsers: wrong text, too deep, too short, ...
            reason = " ".join(str(error).split()) or type(error).__name__
            problems.append(f"{folder / path.name}: is not what its name says: {reason:.200}")
            continue
        if not _matches(path.name, _WEIGHTS) and holds_token(path.read_bytes(), token):
            problems.append(f"{folder / path.name}: holds a token of the Hub or a private key; take it out first")
    _raise_all(problems)


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise RunFolderError("; nothing was pushed\n".join(problems))


def _check_safetensors(path: Path) -> None:
    with safetensors.safe_open(path, framework="numpy") as file:  # reads the header, and checks the sizes in it
        if not file.keys():
            raise ValueError("it holds no tensor")


def _check_json(path: Path) -> None:
    tree = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        raise ValueError("it holds no JSON object")
    if path.name.endswith(".index.json"):
        missing = {str(name) for name in tree["weight_map"].values()} - {file.name for file in path.parent.iterdir()}
        if missing:
            raise ValueError(f"it names {min(missing)}, which is not there")


def _check_lines(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # a run may be writing the last one
        json.loads(line)


def _check_yaml(path: Path) -> None:
    if not isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict):
        raise ValueError("it holds no sections")


def _check_text(path: Path) -> None:
    if "\0" in path.read_text(encoding="utf-8"):
        raise ValueError("it holds NUL bytes")


def _begins_with(magic: bytes) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        with path.open("rb") as file:
            if file.read(len(magic)) != magic:
                raise ValueError(f"it does not begin with {magic!r}")

    return check


# The first pattern that fits a name, and how its content is checked. An .onnx.data file is bare numbers.
_CONTENT = (
    ("*.safetensors", _check_safetensors),
    ("*.gguf", _begins_with(b"GGUF")),
    ("*.onnx", _begins_with(b"\x08")),  # field 1 of a protobuf, the version, a number
    ("tokenizer.model", _begins_with(b"\x0a")),  # field 1, the pieces, a message
    ("*.png", _begins_with(b"\x89PNG\r\n\x1a\n")),
    ("*.json", _check_json),
    ("*.jsonl", _check_lines),
    ("*.yaml", _check_yaml),
    (CARD, _check_text),
    ("LICENSE*", _check_text),
    ("*.txt", _check_text),
    ("*.jinja", _check_text),
)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _is_network(error: Exception | None) -> bool:
    """Whether it is about the connection; huggingface_hub 1 talks through httpx, 2 through httpx2."""
    if error is None or isinstance(error, HfHubHTTPError):
        return False
    of_http = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
    return of_http or isinstance(error, ConnectionError | TimeoutError) or _is_network(error.__cause__)


def _reason(error: Exception) -> str:
    """What went wrong, and what to do about it, without what may hold a secret."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the Hub is not asked; unset it to push"
    if _is_network(error):
        why = " ".join(str(error).split()) or type(error).__name__
        return f"the Hub ({constants.ENDPOINT}) does not answer: {why}; check the network"
    status = _status(error)
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, HfHubHTTPError):  # of an upload in a thread
        error, status = error.__cause__, _status(error.__cause__)
    if status == 401:
        return "the Hub does not accept your token (HF_TOKEN, else the one that `hf auth login` stored); log in anew"
    said = " ".join((getattr(error, "server_message", None) or str(error)).split())[:300]
    if status == 403:
        return f"your token may not write there: {said}"
    return f"the Hub said {status}: {said}" if status else said or type(error).__name__
