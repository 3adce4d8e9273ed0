"""A machine whose speeds need not be measured, for suites that plan."""

import pytest
import strata._core
import strata._profiling.calibrate


@pytest.fixture(autouse=True)
def quick_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test but those of measuring plans for the same made-up machine."""
    if request.module.__name__ == "test_calibrate":
        return
    lanes = ("compute", "upload", "download", "read", "write", "update")
    costs = strata._core.Costs(
        compute_scale=1.0,
        upload_bytes_s=8e9,
        download_bytes_s=8e9,
        read_bytes_s=2e9,
        write_bytes_s=1.5e9,
        update_elements_s=1e9,
        transfer_seconds=1e-5,
        slice_seconds=1e-5,
        slow={a: {b: 0.8 for b in lanes if b != a} for a in lanes},
    )
    monkeypatch.setattr(strata._profiling.calibrate, "costs", lambda *args, **more: costs)
