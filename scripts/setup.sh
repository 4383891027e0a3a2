#!/usr/bin/env bash
# Makes .venv in the project with ckptfs and everything its tests need, and installs FUSE 3 where it is missing.
# Safe to run twice: a second run only looks. Usage: scripts/setup.sh [EXTRA …]   (extras of pyproject.toml; default: test)
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$(IFS=,; echo "${*:-test}")

say() { printf '%s\n' "$*" >&2; }
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else say "ckptfs needs system packages. As root, run: $*"; exit 4; fi
}
need_packages() {
    say "Installing system packages: $*"
    if ! command -v apt-get >/dev/null; then
        say "This is not Debian or Ubuntu. Install the equivalents of: $*"; exit 4
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

missing=()
command -v python3 >/dev/null || missing+=(python3)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
command -v fusermount3 >/dev/null || missing+=(fuse3)
# ldconfig lies outside a plain user's PATH on Debian.
PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null | grep -q 'libfuse3\.so\.3' || missing+=(fuse3)
[ ${#missing[@]} = 0 ] || need_packages $(printf '%s\n' "${missing[@]}" | sort -u)
if [ ! -e /dev/fuse ]; then
    say "/dev/fuse does not exist: load the kernel module (modprobe fuse), or start the container with --device /dev/fuse --cap-add SYS_ADMIN."
    exit 4
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { say "ckptfs needs Python 3.10 or newer; python3 is $(python3 --version)"; exit 4; }

made_of=$(cat pyproject.toml scripts/setup.sh ckptfs/native/src/* | sha256sum | cut -c1-16)
stamp=".venv/.ckptfs-$(echo "$extras" | tr ',' '-')-$made_of"
for made in .venv/.ckptfs-*-"$made_of"; do  # what was made with more extras will do
    has=",$(basename "$made" "-$made_of" | cut -d- -f2- | tr '-' ','),"
    enough=yes
    for extra in ${extras//,/ }; do
        case "$has" in *",$extra,"*) ;; *) enough= ;; esac
    done
    if [ "$enough" ] && [ -e "$made" ]; then stamp=$made; fi
done
if [ ! -e "$stamp" ]; then
    [ -x .venv/bin/python ] || python3 -m venv .venv
    pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
    case ",$extras," in *,test,*|*,torch,*)
        # torch's CPU build has no gigabytes of CUDA behind it; its own index offers one for each release.
        if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
            say "Installing torch (CPU build) …"
            pip install --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "${CKPTFS_TORCH:-torch==2.13.0}"
        fi ;;
    esac
    say "Installing ckptfs[$extras] …"
    pip install -e ".[$extras]"
    # As pip does for packages that it copies: a mount is ready a third sooner when nothing is left to compile.
    .venv/bin/python -m compileall -q ckptfs
    touch "$stamp"
fi
