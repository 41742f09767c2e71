"""Push a model folder to the Hugging Face Hub in one commit: all files arrive or none."""

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import safetensors
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects, get_session

from nanogpt_hf.errors import RunFolderError, UserError, one_line
from nanogpt_hf.export.card import PLACEHOLDER, plain_card
from nanogpt_hf.model.architecture import architecture_on_disk
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.redact import holds_token, redact, redact_tree

CONNECTION_TIMEOUT = 120.0  # seconds without an answer; huggingface_hub's default is no limit
_SCANNED = 2**26  # bytes of a file of weights that are searched for tokens
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".data")
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
# An allow-list: a folder may hold anything else, secrets and pickles too.
_MODEL_FILES = [
    "*.safetensors",
    "*.gguf",
    "*.onnx",
    "*.onnx.data",
    "README.md",
    "LICENSE*",
    *_CONFIGS,
    "*.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
]
_READ_ATTEMPTS = 10


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    url: str  # the commit's
    files: list[str]
    skipped: list[str]  # files of the folder that are not model files
    stale_weights: list[str]  # weight files in the repository that are left from earlier pushes
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
    each, for files that are damaged, hold a token or a private key, or are links out of the
    folder.
    """
    huggingface_hub.utils.logging.set_verbosity_error()  # else every retry is logged
    warnings.filterwarnings("ignore", module="httpx|huggingface_hub")  # such as remarks on a card
    outcome = "nothing was pushed"
    try:
        get_session().timeout = CONNECTION_TIMEOUT
        token = _login(repo_id)
        if holds_token((message or "").encode(), token):
            raise UserError("--message: contains a token of the Hub or a private key; remove it")
        # beside the folder, so that weights can be linked
        beside = folder.parent if os.access(folder.parent, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix=".push-", dir=beside) as name:
            stage, api = Path(name), HfApi(token=token)
            skipped = _stage(stage, folder, repo_id, revision, token)
            files = sorted(os.listdir(stage))
            api.create_repo(repo_id, private=private or None, exist_ok=True)
            if private and not api.model_info(repo_id).private:
                raise UserError(
                    "it is public; make it private in its settings, or push without --private"
                )
            if revision and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            before = api.model_info(repo_id, revision=revision)
            outcome = f"see {constants.ENDPOINT}/{repo_id}: all files arrived, or none"
            # not upload_folder, which may make several commits
            commit = api.create_commit(
                repo_id,
                [CommitOperationAdd(name, stage / name) for name in files],
                commit_message=message or f"Push {folder.resolve().name} with nanogpt_hf",
                revision=revision,
            )
    except RunFolderError as error:
        raise RunFolderError(f"{error}; nothing was pushed") from error
    except Exception as error:  # the network, the Hub, its storage, ...
        if isinstance(error, RuntimeError) and error.__cause__:  # in a thread that uploads
            error = error.__cause__
        outcome = "nothing was pushed" if _status(error) else outcome
        raise UserError(f"{repo_id}: {_reason(error)}; {outcome}") from error
    former = [file.rfilename for file in before.siblings or ()]
    stale = [
        name
        for name in former
        if name not in files and name.endswith((*_WEIGHTS, ".bin", ".index.json"))
    ]
    return Pushed(commit.commit_url, files, skipped, stale, commit.oid != before.sha)


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


def _stage(stage: Path, folder: Path, repo_id: str, revision: str | None, token: str) -> list[str]:
    """Fill `stage` with the files to push; return the names in `folder` that are skipped.

    A training run may replace its model folder at any time; the staged files do not change.
    """
    run = RunFolder(folder.parent)
    of_run = folder in (run.best, run.final) and run.recipe.is_file()
    extra = [run.recipe, run.metrics, run.loss_plot] if of_run else []
    try:
        skipped = _gather(folder, [path for path in extra if path.is_file()], stage)
        problems = [
            f"{folder / path.name}: {problem}"
            for path in sorted(stage.iterdir())
            if (problem := _problem(path, token))
        ]
        if problems:
            raise RunFolderError("; nothing was pushed\n".join(problems))
        _prepare(stage, repo_id, f", revision={json.dumps(revision)}" if revision else "")
        return skipped
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be read or copied: {error.strerror}") from error


def _gather(folder: Path, extra: list[Path], stage: Path) -> list[str]:
    """Link or copy the files to push into `stage`; return the names that are skipped."""
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):  # a newer model has just replaced the folder
            inode, names = folder.stat().st_ino, sorted(os.listdir(folder))
            chosen = filter_repo_objects(names, allow_patterns=_MODEL_FILES)
            paths = [path for name in chosen if (path := folder / name).is_file()]
            if not any(path.suffix in _WEIGHTS for path in paths):
                raise RunFolderError(f"{folder}: has no weights as safetensors, GGUF or ONNX")
            for path in (*paths, *extra):
                if not path.resolve().is_relative_to(path.parent.resolve()):
                    raise RunFolderError(
                        f"{path}: is a link to {path.resolve()}, outside its folder; replace it "
                        "by a copy"
                    )
                link_or_copy(path, stage / path.name)
            if folder.stat().st_ino == inode:
                return [name for name in names if folder / name not in paths]
        for file in stage.iterdir():
            file.unlink()
    raise RunFolderError(
        f"{folder}: was replaced {_READ_ATTEMPTS} times while it was read; try again later"
    )


def link_or_copy(path: Path, target: Path) -> None:
    if path.suffix in _WEIGHTS:
        with contextlib.suppress(OSError):  # another disk, or a file system without links
            os.link(path.resolve(), target)  # the content stays if the name is removed
            return
    shutil.copyfile(path, target)


def _problem(path: Path, token: str) -> str | None:
    """Why a file must not be pushed, if so."""
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="numpy"):
                pass  # its header fits its size
        elif path.suffix == ".json":
            tree = json.loads(path.read_bytes())
            if path.name.endswith(".index.json"):
                missing = {n for n in tree["weight_map"].values() if not (path.parent / n).exists()}
                if missing:
                    return f"names {min(missing)}, which is missing"
    except Exception as error:  # parsers raise many types
        return f"is damaged: {one_line(error, 200)}"
    with path.open("rb") as file:
        if holds_token(file.read(_SCANNED if path.suffix in _WEIGHTS else -1), token):
            return "contains a token of the Hub or a private key; remove it first"
    return None


def _prepare(stage: Path, repo_id: str, revision: str) -> None:
    """Redact recipe and configs, cut an unfinished line of the metrics, and name the repository in
    the card.
    """
    card, recipe, metrics = (stage / name for name in ("README.md", "recipe.yaml", "metrics.jsonl"))
    for path in (stage / name for name in _CONFIGS if (stage / name).exists()):
        tree = json.loads(path.read_bytes())
        if (redacted := redact_tree(tree)) != tree:
            path.write_text(json.dumps(redacted, indent=2) + "\n", encoding="utf-8")
    if recipe.exists():
        recipe.write_text(redact(recipe.read_text(encoding="utf-8")), encoding="utf-8")
    if metrics.exists():  # a run may be writing its next line
        content = metrics.read_bytes()
        metrics.write_bytes(content[: content.rfind(b"\n") + 1])
    if not card.exists() and (stage / "config.json").exists():
        with contextlib.suppress(Exception):  # it is no model that we know
            config = architecture_on_disk(str(stage)).read_config(str(stage), None)
            text = plain_card(
                repo_id.partition("/")[2], config, "whose training is not recorded here"
            )
            card.write_text(text, encoding="utf-8")
    if card.exists():
        text = card.read_text(encoding="utf-8", errors="replace")
        text = text.replace(f'"{PLACEHOLDER}"', f'"{repo_id}"{revision}')
        card.write_text(text, encoding="utf-8")
