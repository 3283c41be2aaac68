#!/bin/sh
# Installs and starts qemu-guest-agent, through which the hypervisor learns this guest's address.
# Idempotent; a failure is said and never stops what the user's own configuration does.
say() { echo "egress-guest-agent: $*"; }

running() {
    if command -v pidof >/dev/null 2>&1; then
        pidof qemu-ga >/dev/null 2>&1
    else
        ps 2>/dev/null | grep -v grep | grep -q qemu-ga
    fi
}

start() {
    if command -v systemctl >/dev/null 2>&1 && [ -d /run/systemd/system ]; then
        # On some systems the unit is started by the device and cannot be enabled: that is fine.
        systemctl enable qemu-guest-agent >/dev/null 2>&1
        systemctl start qemu-guest-agent
    elif command -v rc-service >/dev/null 2>&1; then
        rc-update add qemu-guest-agent default >/dev/null 2>&1
        rc-service qemu-guest-agent start
    else
        say "neither systemd nor OpenRC: not started"
        return 1
    fi
}

present() { command -v qemu-ga >/dev/null 2>&1 || [ -x /usr/sbin/qemu-ga ] || [ -x /usr/bin/qemu-ga ]; }

install() {
    if command -v apt-get >/dev/null 2>&1; then
        apt-get -q -o DPkg::Lock::Timeout=120 update
        DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 \
            install --no-install-recommends qemu-guest-agent
    elif command -v dnf >/dev/null 2>&1; then
        dnf -q -y install qemu-guest-agent
    elif command -v yum >/dev/null 2>&1; then
        yum -q -y install qemu-guest-agent
    elif command -v zypper >/dev/null 2>&1; then
        zypper -n -q install qemu-guest-agent
    elif command -v apk >/dev/null 2>&1; then
        apk add --no-progress qemu-guest-agent
    else
        say "no known package manager"
        return 1
    fi
}

if running; then
    exit 0
fi
# One mirror request that fails must not decide: a few tries, then the boot goes on without.
try=1
while ! present; do
    install && present && break
    if [ "$try" -ge 4 ]; then
        say "could not be installed in $try tries"
        exit 0
    fi
    sleep "$((try * 5))"
    try=$((try + 1))
done
start || say "could not be started"
exit 0
