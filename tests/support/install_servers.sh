#!/bin/sh
# Installs the real servers that some tests drive, from Debian's packages, when they are missing
# and we may. Never fails: the tests themselves say what they miss.
set -u
missing=""
command -v prometheus >/dev/null || missing="$missing prometheus"
command -v prometheus-alertmanager >/dev/null || missing="$missing prometheus-alertmanager"
command -v chromium >/dev/null || missing="$missing chromium"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed and no right to apt-get:$missing (their tests will be skipped)"
    exit 0
fi
echo "installing:$missing"
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null \
    || echo "apt-get could not install:$missing"
exit 0
