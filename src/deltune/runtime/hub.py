"""Pushes deltas to the Hugging Face Hub and fetches them from it, by the client of huggingface_hub.

Of a repository only the files that `deltune.load` reads are downloaded, whatever else is in it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .._version import __version__
from ..errors import DeltuneError, error_summary
from ..interop import adapterhub, peft_read
from ..interop.base import CONFIG_FILE, has_file
from .model_card import HUB_ID, README, update_card
from .serialization import FACTS, NUMBERS

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

FILES = (
    FACTS, NUMBERS, f"delta/{FACTS}", f"delta/{NUMBERS}", CONFIG_FILE, *peft_read.WEIGHT_FILES,
    *adapterhub.WEIGHT_FILES, adapterhub.HEAD_CONFIG, *adapterhub.HEAD_WEIGHTS,
)  # fmt: skip
"""The names of all files that are downloaded: those of a delta, also beside a model that a Trainer pushed, and those of
a folder of PEFT or AdapterHub."""


def names_repository(folder: object) -> bool:
    """Return whether a delta is to be fetched from the hub: OWNER/NAME as text, where no file or folder has that name.

    A `Path`, and text that begins with a dot, a slash or `~`, is always a folder on this machine.
    """
    return isinstance(folder, str) and re.fullmatch(HUB_ID, folder) is not None and not os.path.lexists(folder)


def fetch_delta(repo_id: str, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Download a delta from the hub into its cache, where it is found again without a network."""
    from huggingface_hub import snapshot_download

    at = f" at revision {revision!r}" if revision else ""
    with _explain_errors(f"there is no folder {repo_id!r} here, and the delta cannot be fetched from the hub{at}"):
        folder = Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=list(FILES)))
    if not any(has_file(folder, name) for name in (FACTS, f"delta/{FACTS}", CONFIG_FILE)):
        raise DeltuneError(
            f"the repository {repo_id!r}{at} on the hub holds no delta: it has neither {FACTS} nor {CONFIG_FILE}"
        )
    return folder


@dataclass(frozen=True)
class Commit:
    """A commit to be made on the hub: arguments of `HfApi.create_commit`, described at `Tuned.push_to_hub`."""

    commit_message: str
    commit_description: str | None
    revision: str | None
    create_pr: bool


def push_delta(
    folder: Path, card: str, repo_id: str, commit: Commit, private: bool | None, token: str | bool | None
) -> CommitInfo:
    """Upload a saved delta and its model card in one commit."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if re.fullmatch(HUB_ID, repo_id) is None:
        raise DeltuneError(f"{repo_id!r} cannot be a repository of the hub: give OWNER/NAME, such as 'user/my-delta'")
    with _explain_errors(f"the delta cannot be pushed to {repo_id!r}"):
        api = HfApi(token=token, library_name="deltune", library_version=__version__)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if private and not api.model_info(repo_id).private:
            raise DeltuneError(
                f"the repository {repo_id!r} exists and is public, and private=True is asked for: nothing was pushed. "
                "Make it private on the hub, or give another name"
            )
        if commit.revision is not None and not commit.revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=commit.revision, exist_ok=True)
        old = _card_on_hub(api, repo_id, commit.revision)
        text = update_card(old, card, f"{README} of {repo_id!r}")
        operations = [CommitOperationAdd(name, folder / name) for name in (FACTS, NUMBERS)]
        return api.create_commit(repo_id, [*operations, CommitOperationAdd(README, text.encode())], **asdict(commit))


def _card_on_hub(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """Return the model card that a repository has, or None."""
    if not api.file_exists(repo_id, README, revision=revision):
        return None
    with open(api.hf_hub_download(repo_id, README, revision=revision), encoding="utf-8", newline="") as file:
        return file.read()


@contextlib.contextmanager
def _explain_errors(problem: str) -> Iterator[None]:
    """Turn an error of the hub's client inside the context into a `DeltuneError` that says what to do."""
    from huggingface_hub import constants, errors

    try:
        yield
    except DeltuneError:
        raise
    except Exception as error:  # the client's errors and those of HTTP have no common ancestor
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.HFValidationError):
            reason = f"{error_summary(error)} A repository is OWNER/NAME"
        elif constants.is_offline_mode():
            reason = "HF_HUB_OFFLINE is set, and it is not in the hub's cache: unset it, or give a folder"
        elif isinstance(error, errors.GatedRepoError):
            reason = "its owner grants access to those who ask for it: ask there, then log in with `hf auth login`"
        elif isinstance(error, errors.RevisionNotFoundError):
            reason = "the repository has no such revision: give a branch, a tag or a commit of it"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = "the hub has no such repository, or it is private: log in with `hf auth login`, or give token=…"
        elif isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403):
            reason = (
                f"the hub does not let you ({error_summary(error)}): log in with `hf auth login`, or give token=… with "
                "the right to write there"
            )
        else:
            reason = f"{constants.ENDPOINT}: {error_summary(error)}"
        raise DeltuneError(f"{problem}: {reason}") from error
