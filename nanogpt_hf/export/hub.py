"""Push a model folder to the Hugging Face Hub in one commit: all files arrive or none."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import get_session

from nanogpt_hf.errors import RunFolderError, UserError, one_line
from nanogpt_hf.export.file_checks import WEIGHT_FILES, matches
from nanogpt_hf.export.staging import staged_files
from nanogpt_hf.runs.redact import holds_token

CONNECTION_TIMEOUT = 120.0  # seconds without an answer; huggingface_hub's default is no limit
_FORMER_WEIGHTS = (*WEIGHT_FILES, "*.bin", "*.index.json")


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    url: str  # of the commit
    files: list[str]
    size: int  # bytes
    skipped: list[str]  # files of the folder that are not model files
    stale_weights: list[str]  # weight files in the repository that are left from earlier pushes
    repo_created: bool
    changed: bool  # whether there was anything to commit


def check_login(repo_id: str, timeout: float = 10.0) -> str | None:
    """Check before a run that pushes to `repo_id` can work.

    Raises UserError for a missing or wrong token, or somebody else's repository. Returns a warning if the Hub does not
    answer, since it may later.
    """
    session = get_session()
    default_timeout, session.timeout = session.timeout, timeout
    try:
        _login(repo_id)
    except Exception as error:
        if isinstance(error, UserError) or _status(error) in (401, 403):
            raise UserError(f"hub.repo: {repo_id}: {_reason(error)}; nothing was started") from error
        return f"hub.repo: {repo_id}: {_reason(error)}; training continues, and each push tries again"
    finally:
        session.timeout = default_timeout
    return None


def push(
    folder: Path,
    repo_id: str,
    *,
    extra: tuple[Path, ...] = (),
    default_card: str | None = None,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> Pushed:
    """Push a model folder and the `extra` files to the model repository `repo_id` (user/name).

    `default_card` is the model card for a folder without one. A missing repository or branch `revision` is created;
    nothing is ever deleted. Raises UserError if there is no login, permission, network or model, and, before anything
    is created or sent and one line each, for files whose content does not match their name, that hold a token or a
    private key, or that are links out of the folder.
    """
    repo_created = sending = False
    huggingface_hub.utils.logging.set_verbosity_error()  # else every retry is logged
    try:
        get_session().timeout = CONNECTION_TIMEOUT
        token = _login(repo_id)
        if holds_token((message or "").encode(), token):
            raise UserError("--message: contains a token of the Hub or a private key; remove it first")
        with staged_files(folder, extra, default_card, repo_id, revision, token) as (stage, skipped):
            files = sorted(path.name for path in stage.iterdir())
            api = HfApi(token=token)
            if not _repo_exists(api, repo_id, private):
                api.create_repo(repo_id, private=private or None)
                repo_created = True
            if revision and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            before = api.model_info(repo_id, revision=revision)
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
    except Exception as error:  # of the network, the Hub, its storage, ...
        state = "nothing was pushed"
        if sending and _is_network(error):
            state = f"a push is one commit, so all files arrived or none: see {constants.ENDPOINT}/{repo_id}"
        elif repo_created:
            state += f"; the repository {repo_id} was created and is empty"
        raise UserError(f"{repo_id}: {_reason(error)}; {state}") from error
    former = [file.rfilename for file in before.siblings or ()]
    return Pushed(
        url=commit.commit_url,
        files=files,
        size=size,
        skipped=skipped,
        stale_weights=[name for name in former if matches(name, _FORMER_WEIGHTS) and name not in files],
        repo_created=repo_created,
        changed=commit.oid != before.sha,
    )


def _login(repo_id: str) -> str:
    """Return the user's token. Raises UserError if no user is logged in, or the user may not write to `repo_id`."""
    token = get_token()
    if token is None:
        raise UserError("not logged in to the Hub; run `hf auth login`, or set HF_TOKEN to a token with write access")
    account = HfApi(token=token).whoami()
    user = account["name"]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"the token of {user} is read-only; create one with write access and log in with it")
    owner = repo_id.partition("/")[0]
    namespaces = [user, *(organization["name"] for organization in account.get("orgs", []))]
    if owner.lower() not in map(str.lower, namespaces):
        allowed = ", ".join(f"{name}/..." for name in namespaces)
        raise UserError(f"{owner} is not your account; you are logged in as {user} and may push to {allowed}")
    return token


def _repo_exists(api: HfApi, repo_id: str, private: bool) -> bool:
    """Raises UserError if the repository is public and `private` is asked for."""
    try:
        info = api.repo_info(repo_id)
    except RepositoryNotFoundError:
        return False
    if private and not info.private:
        raise UserError("it exists and is public; make it private in its settings, or push without --private")
    return True


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an error of the Hub."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _is_network(error: BaseException | None) -> bool:
    """Whether the error is about the connection; huggingface_hub 1 uses httpx, 2 uses httpx2."""
    if error is None or isinstance(error, HfHubHTTPError):
        return False
    of_http = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")
    return of_http or isinstance(error, ConnectionError | TimeoutError) or _is_network(error.__cause__)


def _reason(error: BaseException) -> str:
    """The reason and the remedy in one line, without secrets."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so the Hub cannot be used; unset it to push"
    if _is_network(error):
        reason = one_line(error) or type(error).__name__
        return f"the Hub ({constants.ENDPOINT}) does not answer: {reason}; check the network"
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, HfHubHTTPError):  # of an upload in a thread
        error = error.__cause__
    status = _status(error)
    if status == 401:
        return "the Hub rejects your token (HF_TOKEN, else the one that `hf auth login` stored); log in again"
    answer = one_line(getattr(error, "server_message", None) or error)
    if status == 403:
        return f"your token has no write permission: {answer}"
    return f"the Hub answered {status}: {answer}" if status else answer or type(error).__name__
