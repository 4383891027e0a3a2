"""``ckptfs doctor``"""

from __future__ import annotations

from dataclasses import asdict

import click

from ckptfs.cli.options import json_option
from ckptfs.cli.output import print_json, with_color


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Check what mounting needs from this machine."""
    from ckptfs.errors import MountError
    from ckptfs.mount.doctor import check

    findings = check()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    for finding in () if as_json else findings:
        color = "green" if finding.ok else "red" if finding.essential else "yellow"
        mark = click.style("✓" if finding.ok else "✗", fg=color)
        click.echo(f"{mark} {finding.name}: {finding.detail}", color=with_color())
        if not finding.ok and finding.remedy:
            click.echo(f"    {finding.remedy}")
    return 0 if all(f.ok for f in findings if f.essential) else MountError.exit_code
