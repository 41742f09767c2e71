"""Push a model folder to the Hugging Face Hub in one commit: all files arrive or none."""

import contextlib
import json
import os
import re
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session

from nanogpt_hf.errors import RunFolderError, UserError, one_line
from nanogpt_hf.export.card import PLACEHOLDER
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.redact import holds_token, redact, redact_tree

CONNECTION_TIMEOUT = 120.0  # seconds without an answer; huggingface_hub's default is no limit
_SCANNED = 2**26  # bytes of a file of weights that are searched for tokens
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".data")
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
# An allow-list: a folder may hold anything else, secrets and pickles too.
_MODEL_FILE = re.compile(
    r"""README\.md | LICENSE.* | (generation_|adapter_)?config\.json
    | .+\.(safetensors(\.index\.json)?|gguf|onnx|onnx\.data) | tokenizer(.*\.json|\.model)
    | (vocab|special_tokens_map|added_tokens)\.json | merges\.txt | chat_template\.jinja""",
    re.VERBOSE,
)
_READ_ATTEMPTS = 10


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    url: str  # the commit's
    files: list[str]
    skipped: list[str]  # files of the folder that are not model files
    changed: bool  # whether there was anything to commit


def check_login(repo_id: str, timeout: float = 10.0) -> str | None:
    """Check before a run that pushes to `repo_id` can work.

    Raises UserError for a missing or wrong token, or somebody else's repository. Returns a warning
    if the Hub does not answer, since it may later.
    """
    session = get_session()
    default_timeout, session.timeout = session.timeout, timeout
    try:
        _login(repo_id)
    except Exception as error:
        line = f"hub.repo: {repo_id}: {_reason(error)}"
        if isinstance(error, UserError) or _status(error) in (401, 403):
            raise UserError(f"{line}; nothing was started") from error
        return f"{line}; training continues, and each push tries again"
    finally:
        session.timeout = default_timeout
    return None


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> Pushed:
    """Push a model folder to the model repository `repo_id` (user/name).

    With best/ or final/ go the recipe, the metrics and the loss plot of its run. A missing
    repository or branch `revision` is created; nothing is ever deleted. Raises UserError if there
    is no login, permission, network or model, and, before anything is created or sent and one line
    each, for files that hold a token or a private key, or are links out of the folder.
    """
    huggingface_hub.utils.logging.set_verbosity_error()  # else every retry is logged
    warnings.filterwarnings("ignore", module="httpx|huggingface_hub")  # such as remarks on a card
    folder = Path(os.path.abspath(folder))  # `push .` within best/ finds the run, too
    outcome = "nothing was pushed"
    try:
        get_session().timeout = CONNECTION_TIMEOUT
        token = _login(repo_id)
        # beside the folder, so that weights can be linked
        beside = folder.parent if os.access(folder.parent, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix=".push-", dir=beside) as links:
            files, skipped = _gather(folder, Path(links))
            files = {path: _content(path, files[path], repo_id, revision) for path in files}
            texts = {Path("--message"): (message or "").encode(), **files}
            if secrets := [path for path in texts if holds_token(_head(texts[path]), token)]:
                line = "contains a token of the Hub or a private key; remove it first"
                raise RunFolderError(
                    "; nothing was pushed\n".join(f"{path}: {line}" for path in secrets)
                )
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private or None, exist_ok=True)
            if private and not api.model_info(repo_id).private:
                raise UserError(
                    "it is public; make it private in its settings, or push without --private"
                )
            if revision and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            before = api.model_info(repo_id, revision=revision).sha
            outcome = f"see {constants.ENDPOINT}/{repo_id}: all files arrived, or none"
            additions = [CommitOperationAdd(path.name, files[path]) for path in files]
            # Weights one by one, in this thread: a process that is asked to end would wait for the
            # threads of huggingface_hub's pool until all files have been sent.
            for addition in additions:
                if addition.path_in_repo.endswith(_WEIGHTS):
                    api.preupload_lfs_files(repo_id, [addition], revision=revision)
            # not upload_folder, which may make several commits
            commit = api.create_commit(
                repo_id,
                additions,
                commit_message=message or f"Push {folder.resolve().name} with nanogpt_hf",
                revision=revision,
            )
    except RunFolderError as error:
        raise RunFolderError(f"{error}; nothing was pushed") from error
    except Exception as error:  # the network, the Hub, its storage, ...
        if isinstance(error, RuntimeError) and error.__cause__:  # of an upload
            error = error.__cause__
        outcome = "nothing was pushed" if _status(error) else outcome
        raise UserError(f"{repo_id}: {_reason(error)}; {outcome}") from error
    names = sorted(path.name for path in files)
    return Pushed(commit.commit_url, names, skipped, commit.oid != before)


def _login(repo_id: str) -> str:
    """Return the user's token.

    Raises UserError if no user is logged in, or the user may not write to `repo_id`.
    """
    token = huggingface_hub.get_token()
    if token is None:
        raise UserError(
            "not logged in to the Hub; run `hf auth login`, or set HF_TOKEN to a token with "
            "write access"
        )
    account = HfApi(token=token).whoami()
    user = account["name"]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(
            f"the token of {user} is read-only; create one with write access and log in with it"
        )
    owner = repo_id.partition("/")[0]
    names = [user, *(organization["name"] for organization in account.get("orgs", []))]
    if owner.lower() not in map(str.lower, names):
        raise UserError(
            f"{owner} is not your account; you are logged in as {user} and may push to "
            f"{', '.join(f'{name}/...' for name in names)}"
        )
    return token


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of the Hub."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _reason(error: BaseException) -> str:
    """The reason and the remedy in one line, without secrets."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the Hub cannot be used; unset it to push"
    status = _status(error)
    if status is None and isinstance(error, UserError | ValueError):
        return one_line(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return f"{error.filename or 'a copy for the push'}: {error.strerror}"
    answer = one_line(getattr(error, "server_message", None) or str(error)) or type(error).__name__
    if status is None:
        return f"the Hub ({constants.ENDPOINT}) does not answer: {answer}; check the network"
    if status == 401:
        return (
            "the Hub rejects your token (HF_TOKEN, else the one that `hf auth login` stored); "
            "log in again"
        )
    if status == 403:
        return f"your token has no write permission: {answer}"
    return f"the Hub answered {status}: {answer}"


def _gather(folder: Path, links: Path) -> tuple[dict[Path, Path | bytes], list[str]]:
    """Read the files to push; also return the names in `folder` that are not pushed.

    Weights become hard links or copies in `links`, since a training run may replace its model
    folder at any time. Raises RunFolderError if there is no model, or a link out of the folder.
    """
    run = RunFolder(folder.parent)
    of_run = folder in (run.best, run.final) and run.recipe.is_file()
    extra = [run.recipe, run.metrics, run.loss_plot] if of_run else []
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):  # a newer model has just replaced the folder
            inode, names = folder.stat().st_ino, sorted(os.listdir(folder))
            paths = [folder / name for name in names if _MODEL_FILE.fullmatch(name)]
            paths = [path for path in paths if path.is_file()]
            if not any(path.suffix in _WEIGHTS for path in paths):
                raise RunFolderError(f"{folder}: has no weights as safetensors, GGUF or ONNX")
            found = {}
            for path in (*paths, *(path for path in extra if path.is_file())):
                if not path.resolve().is_relative_to(path.parent.resolve()):
                    raise RunFolderError(
                        f"{path}: is a link to {path.resolve()}, outside its folder; replace it "
                        "by a copy"
                    )
                is_large = path.suffix in _WEIGHTS
                found[path] = link_or_copy(path, links) if is_large else path.read_bytes()
            if folder.stat().st_ino == inode:
                return found, [name for name in names if folder / name not in paths]
    raise RunFolderError(
        f"{folder}: was replaced {_READ_ATTEMPTS} times while it was read; try again later"
    )


def link_or_copy(path: Path, folder: Path) -> Path:
    """Link a file into `folder`; its content stays if the original is removed."""
    target = folder / path.name
    target.unlink(missing_ok=True)
    try:
        os.link(path.resolve(), target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(path, target)
    return target


def _content(path: Path, content: Path | bytes, repo_id: str, revision: str | None) -> Path | bytes:
    """The content of a file as other people get it."""
    if isinstance(content, Path):
        return content
    if path.name == "README.md":
        place = f'"{repo_id}"' + (f", revision={json.dumps(revision)}" if revision else "")
        return content.replace(f'"{PLACEHOLDER}"'.encode(), place.encode())
    if path.name == "recipe.yaml":
        return redact(content.decode()).encode()
    if path.name == "metrics.jsonl":  # a run may be writing its next line
        return content[: content.rfind(b"\n") + 1]
    if path.name in _CONFIGS:
        try:
            tree = json.loads(content)
        except ValueError as error:
            raise RunFolderError(f"{path}: is damaged: {one_line(error, 200)}") from None
        if (redacted := redact_tree(tree)) != tree:
            return f"{json.dumps(redacted, indent=2)}\n".encode()
    return content


def _head(content: Path | bytes) -> bytes:
    """What is searched for secrets: a whole small file, or the start of a file of weights."""
    if isinstance(content, bytes):
        return content
    with content.open("rb") as file:
        return file.read(_SCANNED)
