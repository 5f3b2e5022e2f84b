#!/bin/sh
# Builds what boots the emulated NVMe machine: Debian's kernel and a small initramfs, from Debian's packages.
#   build_guest.sh FOLDER
# Needs no root. Leaves FOLDER/vmlinuz and FOLDER/initrd. The guest has no root file system of its own: its init mounts
# this machine's over 9p, read-only, and works in there.
set -eu
folder=$1
here=$(dirname "$(readlink -f "$0")")
for tool in apt-get dpkg-deb depmod cpio mkfs.xfs qemu-system-x86_64; do
    command -v $tool >/dev/null || PATH=$PATH:/sbin:/usr/sbin command -v $tool >/dev/null || {
        echo "make test-nvme needs $tool: apt-get install qemu-system-x86 kmod cpio xfsprogs (on Debian or Ubuntu)" >&2
        exit 1
    }
done
PATH=$PATH:/sbin:/usr/sbin
[ -e "$folder/initrd" ] && [ "$folder/initrd" -nt "$here/build_guest.sh" ] && [ "$folder/initrd" -nt "$here/init.sh" ] && exit 0

rm -rf "$folder"
mkdir -p "$folder/debs" "$folder/kernel" "$folder/root"
cd "$folder/debs"
image=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
apt-get download -q "$image" busybox-static
for deb in *.deb; do dpkg-deb -x "$deb" "$folder/kernel"; done
cd "$folder"
version=$(basename "$(echo kernel/lib/modules/*)")
cp kernel/boot/vmlinuz-* vmlinuz

mkdir -p root/bin root/lib root/dev root/proc root/sys root/host
cp kernel/bin/busybox root/bin/busybox
depmod -b kernel "$version"
for module in virtio_pci 9pnet_virtio 9p nvme ext4 xfs crc32c_generic uio_pci_generic overlay; do
    modprobe -d kernel -S "$version" --show-depends $module | sed -n 's/^insmod \([^ ]*\).*/\1/p'
done | awk '!seen[$0]++' > modules
i=100
for file in $(cat modules); do # numbered, so that the init inserts them in order of their dependencies
    i=$((i + 1))
    cp "$file" "root/lib/$i-$(basename "$file")"
done
cp "$here/init.sh" root/init
chmod +x root/init
(cd root && find . | cpio -o -H newc --quiet | gzip -1) > initrd.part
rm -rf kernel root debs modules
mv initrd.part initrd # last: it is the sign that all of it is there
