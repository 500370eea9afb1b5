"""Where a policy comes from: a directory, or a name on the hub."""

from pathlib import Path

import huggingface_hub
import pytest

from rlite.modules.base import PolicyModule, is_hub_id


def test_a_name_with_one_slash_is_a_hub_id_unless_such_a_directory_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("deepseek-ai/DeepSeek-V3")
    (tmp_path / "deepseek-ai" / "DeepSeek-V3").mkdir(parents=True)
    assert not is_hub_id("deepseek-ai/DeepSeek-V3")
    assert not is_hub_id("models/smollm2-135m"), "a directory that `make smollm2` has yet to write"
    assert not is_hub_id("nowhere") and not is_hub_id("/models/a/b") and not is_hub_id("configs/models/tiny_dsv3")


def test_a_hub_policy_is_downloaded_once_and_then_found_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, local_files_only: calls.append(local_files_only) or "/cache/it",
    )
    module = PolicyModule(policy="org/model")
    module.prepare_data()
    assert (module.policy_dir, module.tokenizer_dir, calls) == ("/cache/it", "/cache/it", [False, True])


def test_a_policy_that_is_neither_here_nor_on_the_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, local_files_only: bool) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"model.policy = 'org/model': no such directory.*no network"):
        PolicyModule(policy="org/model").prepare_data()
