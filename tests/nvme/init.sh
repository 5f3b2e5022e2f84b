#!/bin/busybox sh
# The guest's first process: the host's file system read-only at /host, scratch space where tests write, the emulated
# drives at /dev/nvme*, then the command on the kernel's command line. The exit status goes to the console.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /lib/*.ko; do insmod $module; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,ro host /host || echo "guest: no 9p"
for folder in proc sys dev; do mount --rbind /$folder /host/$folder; done
mount -t tmpfs tmpfs /host/run
mkdir -p /host/run/scratch /host/run/upper /host/run/work /host/dev/shm
# In /tmp, xNVMe has the locks of drives that are shared, and the project may be there.
mount -t overlay -o lowerdir=/host/tmp,upperdir=/host/run/upper,workdir=/host/run/work overlay /host/tmp
mount -t tmpfs tmpfs /host/dev/shm
ip link set lo up
eval "$(sed -n 's/.*guest_env=\([^ ]*\).*/\1/p' /proc/cmdline | base64 -d)"
chroot /host /bin/sh -c "$GUEST_COMMAND"
echo "guest: exit status $?"
echo o > /proc/sysrq-trigger
sleep 10
