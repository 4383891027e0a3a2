"""``ckptfs doctor``"""

from __future__ import annotations

from dataclasses import asdict

import click

from ckptfs.cli.options import json_option
from ckptfs.cli.output import print_json


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Check what mounting needs from this machine."""
    from ckptfs.environment import check
    from ckptfs.errors import MountError

    findings = check()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    for finding in () if as_json else findings:
        mark = (
            click.style("✓", fg="green")
            if finding.ok
            else click.style("✗", fg="red" if finding.essential else "yellow")
        )
        click.echo(f"{mark} {finding.name}: {finding.detail}")
        if not finding.ok and finding.remedy:
            click.echo(f"    {finding.remedy}")
    return 0 if all(f.ok for f in findings if f.essential) else MountError.exit_code
