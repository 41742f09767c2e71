"""Push a model folder to the Hugging Face Hub in one commit; also while training continues."""

import contextlib
import json
import logging
import os
import queue
import re
import shlex
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars

from nanogpt_hf.config.schema import HubSection
from nanogpt_hf.errors import RunFolderError, UserError, one_line
from nanogpt_hf.export.card import PLACEHOLDER, card_with_results, card_without_run
from nanogpt_hf.export.login import login, reason_of
from nanogpt_hf.model.architecture import architecture_on_disk
from nanogpt_hf.program import program
from nanogpt_hf.runs.files import redact
from nanogpt_hf.runs.folder import RunFolder, run_of_model

# Seconds that a run waits for its last push: one that is finished, and one that a signal has
# stopped, which launchers kill after 30.
FINAL_TIMEOUT = 600.0
STOPPED_TIMEOUT = 10.0
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".data")
# An allow-list: a folder may hold anything else, secrets and pickles too.
_MODEL_FILE = re.compile(
    r"""README\.md | LICENSE.* | (generation_|adapter_)?config\.json
    | .+\.(safetensors(\.index\.json)?|gguf|onnx|onnx\.data) | tokenizer(.*\.json|\.model)
    | (vocab|special_tokens_map|added_tokens)\.json | merges\.txt | chat_template\.jinja""",
    re.VERBOSE,
)
# Tokens of the Hub and private keys, as they are spelled.
_SECRET = re.compile(rb"hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
logger = logging.getLogger(__name__)


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    results: Path | None = None,
    run: RunFolder | None = None,
) -> str:
    """Push a model folder to the model repository `repo_id` (user/name), and return the commit's
    URL.

    The recipe, the metrics and the loss plot of `run` are pushed, too; for best/ and final/ it is
    by default the run that they are in. A missing repository or branch `revision` is created;
    nothing is ever deleted. The card shows the figures of `results`, a file that `evaluate --json`
    has written. Raises UserError; for a file that holds a secret, or is a link out of the folder,
    before anything is sent.
    """
    huggingface_hub.utils.logging.set_verbosity_error()  # else every retry is logged
    warnings.filterwarnings("ignore", module="httpx|huggingface_hub")  # such as remarks on a card
    # Absolute, so that `push .` within best/ finds the run, too.
    folder = Path(os.path.abspath(os.path.expanduser(folder)))
    beside = folder.parent if os.access(folder.parent, os.W_OK) else None  # links cross no disks
    outcome = "nothing was pushed"
    try:
        token = login(repo_id)
        with tempfile.TemporaryDirectory(prefix=".push-", dir=beside) as links:
            place = f'"{repo_id}"' + (f", revision={json.dumps(revision)}" if revision else "")
            contents = _contents(folder, run or run_of_model(folder), Path(links), place)
            if results is not None:
                card = folder / "README.md"
                results = Path(os.path.expanduser(results))
                contents[card] = _card_with_results(contents[card], repo_id, results)
            # Text files are in memory, weights are paths. Nothing has been sent yet.
            for path, text in contents.items():
                if isinstance(text, bytes) and (token.encode() in text or _SECRET.search(text)):
                    raise RunFolderError(f"{path}: contains a token of the Hub or a private key")
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private or None, exist_ok=True)
            if private and not api.model_info(repo_id).private:
                raise UserError("it is public; change its settings, or push without --private")
            if revision:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            additions = [
                CommitOperationAdd(path.name, content) for path, content in contents.items()
            ]
            # Weights one by one, in this thread: a process that is asked to end would wait for the
            # threads of huggingface_hub's pool until all files have been sent. The commit below
            # then has no files to send but small ones.
            for addition in additions:
                if addition.path_in_repo.endswith(_WEIGHTS):
                    api.preupload_lfs_files(repo_id, [addition], revision=revision)
            outcome = f"see {constants.ENDPOINT}/{repo_id}: all files arrived, or none"
            # Not upload_folder, which may make several commits: a reader would see half a model.
            title = message or f"Push {folder.resolve().name} with nanogpt_hf"
            commit = api.create_commit(repo_id, additions, commit_message=title, revision=revision)
    except Exception as error:  # the network, the Hub, its storage, ...
        where = "" if isinstance(error, RunFolderError) else f"{repo_id}: "
        outcome = "nothing was pushed" if isinstance(error, HfHubHTTPError) else outcome
        raise UserError(f"{where}{reason_of(error)}; {outcome}") from error
    return commit.commit_url


def _contents(
    folder: Path, run: RunFolder | None, links: Path, place: str
) -> dict[Path, bytes | Path]:
    """Files to push: their content, or for weights a link or copy in `links`.

    Raises RunFolderError if a training run replaces the folder meanwhile: all files are of one
    model.
    """
    extra = [run.recipe, run.metrics, run.loss_plot] if run else []
    # Training replaces a folder by renaming another one into its place, which has another inode.
    inode = folder.stat().st_ino
    paths = [path for path in sorted(folder.iterdir()) if _MODEL_FILE.fullmatch(path.name)]
    if not any(path.suffix in _WEIGHTS for path in paths):
        raise RunFolderError(f"{folder}: has no weights as safetensors, GGUF or ONNX")
    found = {path: _content(path, links, place) for path in (*paths, *extra) if path.is_file()}
    if (card := folder / "README.md") not in found:
        found[card] = _missing_card(folder).replace(f'"{PLACEHOLDER}"', place).encode()
    if folder.stat().st_ino != inode:
        raise RunFolderError(f"{folder}: a newer model has just replaced it; push again")
    return found


def _card_with_results(card: bytes | Path, repo_id: str, results: Path) -> bytes:
    """A card with the figures of a file. Raises RunFolderError if it has none."""
    assert isinstance(card, bytes)
    try:
        figures = json.loads(results.read_text(encoding="utf-8"))
        if not isinstance(figures, dict):
            raise ValueError("expected an object")
        return card_with_results(card.decode(), repo_id.partition("/")[2], figures).encode()
    except OSError as error:
        raise RunFolderError(f"--results {results}: {error.strerror}") from None
    except ValueError as error:
        raise RunFolderError(f"--results {results}: {one_line(error)}") from None
    # Another program's JSON, with other keys and types.
    except (AttributeError, KeyError, TypeError, OverflowError):
        line = "not a file that `evaluate --json` has written"
        raise RunFolderError(f"--results {results}: {line}") from None


def _missing_card(folder: Path) -> str:
    """A card for a folder without one, from its files."""
    endings = {path.suffix for path in folder.iterdir()}
    config = None
    library = next((name for name in ("gguf", "onnx") if f".{name}" in endings), "transformers")
    if (folder / "adapter_config.json").is_file():
        library = "peft"
    elif (folder / "config.json").is_file():
        # The config may be of a type that we do not know, or damaged: the card then states less.
        with contextlib.suppress(Exception):
            config = architecture_on_disk(str(folder)).read_config(str(folder))
    return card_without_run(config, "pushed with nanogpt_hf", library)


def _content(path: Path, links: Path, place: str) -> bytes | Path:
    """Content of a file as other people get it."""
    original = path.resolve()
    if not original.is_relative_to(path.parent.resolve()):
        raise RunFolderError(f"{path}: is a link to {original}, outside its folder")
    if path.suffix in _WEIGHTS:
        target = links / path.name
        # A link keeps the file that was there when the push began, also if training replaces it.
        try:
            os.link(original, target)
        except OSError:  # another disk, or a file system without links
            shutil.copyfile(original, target)
        return target
    content = original.read_bytes()
    if path.name == "README.md":
        return content.replace(f'"{PLACEHOLDER}"'.encode(), place.encode())
    if path.name == "metrics.jsonl":
        # A run may be writing its next line: whole lines only.
        return content[: content.rfind(b"\n") + 1]
    if path.name.endswith(("config.json", "recipe.yaml")):
        return redact(content.decode()).encode()
    return content


class BackgroundPush:
    """Pushes to hub.repo in a thread, one model at a time; a failed push stops no run.

    A push that hangs cannot keep the process; huggingface_hub's `run_as_future` would.
    """

    def __init__(self, hub: HubSection, folder: RunFolder, *, is_main: bool = True):
        self.hub = hub
        self.active = is_main and hub.push is not None
        self.folder = folder.best if hub.push == "best" else folder.final
        words = ["push", str(self.folder), str(hub.repo), *["--private"] * hub.private]
        self._by_hand = f"by hand: {program()} {shlex.join(words)}"
        self._models: queue.Queue[Path] = queue.Queue(maxsize=1)
        if self.active:
            disable_progress_bars()
            threading.Thread(target=self._push_models, daemon=True).start()

    def new_model(self, folder: Path) -> None:
        """Push `folder`, which training has just written, after the push that is running."""
        if self.active and folder == self.folder:
            # If a push waits already, it will push the newest model of this folder.
            with contextlib.suppress(queue.Full):
                self._models.put_nowait(folder)

    def finish(self, done: bool) -> None:
        """Wait for the running push, up to a limit; after that, log how to push by hand.

        A run that is `done` pushes once more. Weights that the Hub has are not sent again; metrics
        and loss plot are.
        """
        if done and self.folder.is_dir():
            self.new_model(self.folder)
        if self._models.unfinished_tasks:
            logger.info(f"hub: pushing {self.folder} to {self.hub.repo}; Ctrl-C cancels the push")
        # In short waits, since `Queue.join` has no time limit.
        deadline = time.monotonic() + (FINAL_TIMEOUT if done else STOPPED_TIMEOUT)
        with contextlib.suppress(KeyboardInterrupt):
            while self._models.unfinished_tasks and time.monotonic() < deadline:
                time.sleep(0.1)
        if self._models.unfinished_tasks:
            logger.warning(f"hub: the last push was canceled; {self._by_hand}")

    def _push_models(self) -> None:
        while True:
            self._models.get()
            try:
                url = push(self.folder, str(self.hub.repo), private=self.hub.private)
                logger.info(f"hub: {self.folder} -> {url}")
            except Exception as error:  # the next model tries again
                logger.warning(f"hub: {one_line(error)}; training continues; {self._by_hand}")
            self._models.task_done()
