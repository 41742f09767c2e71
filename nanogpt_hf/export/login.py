"""The login to the Hugging Face Hub: whether a push can work. Without torch, to be quick."""

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session

from nanogpt_hf.errors import UserError, explain, one_line

# Seconds without an answer. huggingface_hub's default is no limit, so a push might hang forever.
CONNECTION_TIMEOUT = 60.0


def check_login(repo_id: str) -> str | None:
    """Check before a run that pushes to `repo_id` can work.

    Raises UserError if it cannot. Returns a warning if the Hub does not answer: it may later.
    """
    try:
        login(repo_id)
    except Exception as error:
        line = f"hub.repo: {repo_id}: {reason_of(error)}"
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        if refused or isinstance(error, UserError):
            raise UserError(f"{line}; nothing was started") from error
        return f"{line}; training continues, and each push tries again"
    return None


def login(repo_id: str) -> str:
    """Return the user's token. Raises UserError if there is none, or it may not write there."""
    # The session of all requests of huggingface_hub in this process.
    get_session().timeout = CONNECTION_TIMEOUT
    token = huggingface_hub.get_token()
    if token is None:
        raise UserError("not logged in to the Hub; run `hf auth login`, or set HF_TOKEN")
    account = HfApi(token=token).whoami()
    names = [account["name"], *(org["name"] for org in account.get("orgs", []))]
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise UserError(f"the token of {names[0]} is read-only; create one with write access")
    # The Hub's names have no case.
    owner = repo_id.partition("/")[0]
    if owner.lower() not in map(str.lower, names):
        raise UserError(f"{owner} is not your account; you may push to {', '.join(names)}")
    return token


def reason_of(error: Exception) -> str:
    return explain(error) or one_line(error) or type(error).__name__
