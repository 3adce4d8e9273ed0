"""What a run writes to the SSD, and what that means for a drive that lasts for so many bytes.

    wear_lines(84e9, endurance_bytes=600 * 10**12, steps=200, step_seconds=60.0)

A drive's endurance (TBW, terabytes written) is on its data sheet; the kernel does not tell it.
"""

from math import floor, log10

from .._config.sizes import format_duration, format_number

WORN_SHARE = 0.05  # of the endurance that one run may take without a warning
DAY_SECONDS = 86400


def wear_lines(
    bytes_per_step: float,
    endurance_bytes: int | None = None,
    steps: int | None = None,
    step_seconds: float | None = None,
) -> list[str]:
    """Sentences for people; none where nothing is written. `steps`: of the whole run."""
    if not bytes_per_step:
        return []
    written = [f"{format_decimal(bytes_per_step)} a step are written to the SSD"]
    if step_seconds:
        written.append(f"{format_decimal(bytes_per_step * DAY_SECONDS / step_seconds)} a day")
    if steps:
        written.append(
            f"{format_decimal(steps * bytes_per_step)} in {steps:,} step{'s' * (steps != 1)}"
        )
    lines = [", ".join(written)]
    if endurance_bytes:
        lasts = endurance_bytes / bytes_per_step
        lines.append(
            f"a drive of {format_decimal(endurance_bytes)} endurance is worn out in "
            f"{_rounded(lasts)}"
            + (f" ({format_duration(lasts * step_seconds)})" if step_seconds else "")
        )
        if steps and steps * bytes_per_step > WORN_SHARE * endurance_bytes:
            share = 100 * steps * bytes_per_step / endurance_bytes
            lines.append(
                f"warning: this run takes {format_number(share)} % of the drive's endurance"
            )
    return lines


def format_decimal(size: float) -> str:
    """As drives are sold: 600 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} TB" if size >= 100 else f"{size:.3g} TB"


def _rounded(count: float) -> str:
    """Two digits of it: 7,100 steps."""
    if count < 1:
        return "less than a step"
    unit = 10 ** max(0, floor(log10(max(1.0, count))) - 1)
    rounded = floor(count / unit) * unit
    return f"{rounded:,} step{'s' * (rounded != 1)}"
