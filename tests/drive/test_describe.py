"""What is read about the drive under a path, on small trees that look like /sys, and on the machine itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.drive.describe import Disk, Drive, Queue, default_block_bytes, drive_of
from infinity.errors import StoreError

SSD = {"size": "4000797360", "device/model": "Samsung SSD 990 PRO 2TB  ", "wwid": "eui.0025384331b00f3d"}
QUEUE = {
    "queue/max_sectors_kb": "1280",
    "queue/max_hw_sectors_kb": "2048",
    "queue/max_segments": "127",
    "queue/nr_requests": "1023",
    "queue/scheduler": "[none] mq-deadline kyber",
    "queue/io_poll": "1",
    "queue/write_cache": "write through",
    "queue/dma_alignment": "3",
    "queue/logical_block_size": "512",
    "queue/physical_block_size": "4096",
    "queue/rotational": "0",
}


class Machine:
    """A made-up machine: a folder to be mounted on, and trees to describe what is."""

    def __init__(self, root: Path) -> None:
        self.mounted = root / "mnt"
        self.mounted.mkdir()
        self.sysfs = root / "sys"
        self.mountinfo = root / "mountinfo"
        (self.sysfs / "dev/block").mkdir(parents=True)
        (self.sysfs / "class/block").mkdir(parents=True)
        self.mountinfo.write_text("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")

    def device(self, place: str, number: str, files: dict[str, str]) -> Path:
        """A device under /sys/devices, with the names that lead to it."""
        folder = self.sysfs / "devices" / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n")
        (self.sysfs / "dev/block" / number).symlink_to(folder)
        (self.sysfs / "class/block" / folder.name).symlink_to(folder)
        return folder

    def mount(
        self, mounted: str, *, point: str | None = None, number: str = "0:99", options: str = "rw,relatime"
    ) -> None:
        """Mount on the folder: `mounted` is the file system, its source and its options."""
        at = str(point or self.mounted).replace(" ", r"\040")
        with self.mountinfo.open("a") as file:
            file.write(f"99 27 {number} / {at} {options} shared:1 - {mounted}\n")

    def drive(self, path: Path | None = None) -> Drive:
        return drive_of(path or self.mounted, mountinfo=self.mountinfo, sysfs=self.sysfs)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def stack(device: Path, *slaves: Path) -> None:
    (device / "slaves").mkdir()
    for slave in slaves:
        (device / "slaves" / slave.name).symlink_to(slave)


def test_partition_of_an_nvme_drive_leads_to_its_disk(machine: Machine) -> None:
    controller = "pci0000:00/0000:41:00.0/nvme/nvme0"
    disk = machine.device(f"{controller}/nvme0n1", "259:0", SSD | QUEUE)
    machine.device(f"{controller}/nvme0n1/nvme0n1p2", "259:2", {"partition": "2", "size": "8"})
    (machine.sysfs / "devices" / controller / "transport").write_text("pcie\n")
    (machine.sysfs / "devices/pci0000:00/0000:41:00.0/numa_node").write_text("1\n")
    (disk / "device/transport").write_text("pcie\n")
    machine.mount("ext4 /dev/nvme0n1p2 rw,discard", number="259:2")

    drive = machine.drive()
    assert drive == Drive(
        path=str(machine.mounted),
        mount_point=str(machine.mounted),
        file_system="ext4",
        source="/dev/nvme0n1p2",
        mount_options=("rw", "relatime", "discard"),
        device="nvme0n1p2",
        layers=(),
        disks=(
            Disk(
                name="nvme0n1",
                model="Samsung SSD 990 PRO 2TB",
                identity="eui.0025384331b00f3d",
                transport="nvme",
                nbytes=4000797360 * 512,
                rotational=False,
                numa_node=1,
            ),
        ),
        queue=Queue(1280, 2048, 127, 1023, "none", True, "write through", 3, 512, 4096),
    )
    assert (drive.model, drive.identity) == ("Samsung SSD 990 PRO 2TB", "ext4 + eui.0025384331b00f3d")
    assert "ro" not in drive.mount_options


def test_multipath_nvme_over_a_network_is_told_by_its_controllers(machine: Machine) -> None:
    subsystem = machine.sysfs / "devices/virtual/nvme-subsystem/nvme-subsys0"
    for name, transport, node in (("nvme0", "tcp", "-1"), ("nvme1", "tcp", "0")):
        controller = machine.sysfs / "devices/virtual/nvme-fabrics/ctl" / name
        controller.mkdir(parents=True)
        (controller / "transport").write_text(f"{transport}\n")
        (controller / "numa_node").write_text(f"{node}\n")
        subsystem.mkdir(parents=True, exist_ok=True)
        (subsystem / name).symlink_to(controller)
    disk = machine.device("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "259:0", {"size": "8"})
    (disk / "device").symlink_to(subsystem)
    machine.mount("xfs /dev/nvme0n1 rw", number="259:0")
    (found,) = machine.drive().disks
    assert (found.transport, found.numa_node) == ("nvme-tcp", 0)


def test_lvm_on_raid_is_followed_to_every_disk_once(machine: Machine) -> None:
    disks = [machine.device(f"pci0/ata{i}/host{i}/block/sd{'ab'[i]}", f"8:{16 * i}", SSD | QUEUE) for i in range(2)]
    parts = [
        machine.device(f"pci0/ata{i}/host{i}/block/sd{'ab'[i]}/sd{'ab'[i]}1", f"8:{16 * i + 1}", {"partition": "1"})
        for i in range(2)
    ]
    raid = machine.device("virtual/block/md0", "9:0", {"md/level": "raid0"})
    stack(raid, *parts)
    stack(disks[0])
    volume = machine.device(
        "virtual/block/dm-0",
        "252:0",
        {"dm/uuid": "LVM-aBcD", "dm/name": "fast-swap", "queue/max_sectors_kb": "128"},
    )
    stack(volume, raid, parts[0])
    machine.mount("ext4 /dev/mapper/fast-swap rw", number="252:0")
    drive = machine.drive()
    assert drive.device == "dm-0"
    assert drive.layers == ("dm-0 (LVM fast-swap)", "md0 (raid0)")
    assert [disk.name for disk in drive.disks] == ["sda", "sdb"]
    assert {disk.transport for disk in drive.disks} == {"sata"}
    assert drive.model == "2 x Samsung SSD 990 PRO 2TB"
    assert drive.queue.max_sectors_kb == 128, "the limit of the volume, not of the disks"


def test_encryption_is_a_layer(machine: Machine) -> None:
    disk = machine.device("pci0/virtio1/block/vda", "254:0", {"size": "8", "serial": "vol-1"})
    crypt = machine.device("virtual/block/dm-3", "252:3", {"dm/uuid": "CRYPT-LUKS2-77af-home", "dm/name": "home"})
    stack(crypt, disk)
    machine.mount("ext4 /dev/mapper/home rw", number="252:3")
    drive = machine.drive()
    assert drive.layers == ("dm-3 (CRYPT-LUKS2 home)",)
    assert drive.disks[0].transport == "virtio"
    assert drive.model == "virtio disk"
    assert drive.identity == "ext4 + vol-1"


def test_btrfs_is_found_by_its_source(machine: Machine) -> None:
    machine.device("pci0/usb2/host4/block/sdc", "8:32", {"size": "8"})
    machine.mount("btrfs /dev/sdc rw,subvol=/data", number="0:45")
    drive = machine.drive()
    assert drive.device == "sdc"
    assert drive.disks[0].transport == "usb"


@pytest.mark.parametrize(
    "mount", ["nfs4 server:/export rw,vers=4.2", "tmpfs tmpfs rw,size=1024k", "overlay  rw,lowerdir=/a"]
)
def test_without_a_drive_there_are_no_disks(machine: Machine, mount: str) -> None:
    machine.mount(mount)
    drive = machine.drive()
    assert (drive.device, drive.disks, drive.queue) == (None, (), Queue())
    assert drive.model == drive.file_system == mount.split()[0]


def test_of_mounts_on_one_point_the_last_counts_and_blanks_are_no_trouble(machine: Machine) -> None:
    inner = machine.mounted / "two words"
    inner.mkdir()
    machine.mount("tmpfs one rw", point=str(inner))
    machine.mount("tmpfs two rw", point=str(inner))
    machine.mount("tmpfs three rw")
    machine.mount("tmpfs four rw", point=str(machine.mounted / "two"))
    assert machine.drive(inner).source == "two"
    assert machine.drive(inner).mount_point == str(inner)
    assert machine.drive().source == "three"


@pytest.mark.parametrize(
    ("options", "mounted"), [("ro,relatime", "ext4 x rw"), ("rw,relatime", "ext4 x ro,errors=remount-ro")]
)
def test_read_only_of_mount_or_file_system_counts(machine: Machine, options: str, mounted: str) -> None:
    machine.mount(mounted, options=options)
    drive = machine.drive()
    assert "ro" in drive.mount_options
    assert "rw" not in drive.mount_options


def test_a_link_leads_to_the_drive_it_points_to(machine: Machine, tmp_path: Path) -> None:
    machine.mount("tmpfs there rw")
    (tmp_path / "link").symlink_to(machine.mounted)
    drive = machine.drive(tmp_path / "link")
    assert (drive.path, drive.source) == (str(machine.mounted), "there")


def test_a_missing_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing: No such file or directory: name a folder"):
        drive_of(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StoreError, match=r"loop: .*name a folder"):
        drive_of(tmp_path / "loop")


def test_nothing_to_read_is_nothing_known(tmp_path: Path) -> None:
    drive = drive_of(tmp_path, mountinfo=tmp_path / "none", sysfs=tmp_path / "none")
    assert (drive.file_system, drive.device, drive.disks) == ("unknown", None, ())


def test_this_machine_agrees_with_stat(nvme_path: Path) -> None:
    drive = drive_of(nvme_path)
    assert Path(drive.mount_point).is_mount()
    assert Path(drive.mount_point).stat().st_dev == nvme_path.stat().st_dev
    for disk in drive.disks:
        assert disk.nbytes is None or disk.nbytes > 0


BLOCKS = {None: 1024, 0: 1024, 4: 512, 128: 512, 512: 512, 1023: 512, 1024: 1024, 1280: 1024, 4096: 1024}


@pytest.mark.parametrize(("max_sectors_kb", "block_kb"), [*BLOCKS.items(), (2147483647, 1024)])
def test_default_block_is_the_largest_power_of_two_in_one_request_up_to_1_mib(
    machine: Machine, max_sectors_kb: int | None, block_kb: int
) -> None:
    files = {} if max_sectors_kb is None else {"queue/max_sectors_kb": str(max_sectors_kb)}
    machine.device("pci0/virtio1/block/vda", "254:0", files)
    assert default_block_bytes(machine.drive()) == block_kb * 1024
