"""What the table of strata.from_deepspeed() says of keys that nobody asked for, or took."""

import pytest
import strata


def test_params_of_a_type_that_is_refused_have_a_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="OneCycleLR"):
        strata.from_deepspeed({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0}}})
    told = capsys.readouterr().out
    assert "scheduler.params: belongs to a type, and none is taken" in told


def test_clipping_that_the_file_does_not_ask_for_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    strata.from_deepspeed({})
    told = " ".join(capsys.readouterr().out.split())
    assert "the file does not say; older versions do not clip: write gradient_clipping" in told
    strata.from_deepspeed({"gradient_clipping": 0.5})
    assert "older versions" not in capsys.readouterr().out
