#!/bin/sh
# pip into /opt/pagewire, from the wheels of the build context where there are any, else from an index.
set -eu
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore
if ls /wheelhouse/*.whl >/dev/null 2>&1; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheelhouse
fi
[ -x /opt/pagewire/bin/python ] || python3 -m venv /opt/pagewire
exec /opt/pagewire/bin/python -m pip install "$@"
