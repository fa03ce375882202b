//! Commands with mounts of their own: what an engine wants of a machine and this one has not, and what would
//! otherwise stay behind.

use std::path::Path;
use std::process::Command;

use crate::host::Host;

/// The same command after a script, both with mounts of their own.
pub(crate) fn within_mounts(script: &str, command: &Command) -> Command {
    let mut outer = Command::new("unshare");
    let script = format!("{script}\nexec \"$@\"");
    outer.args(["-m", "sh", "-euc", &script, "sh"]).arg(command.get_program()).args(command.get_args());
    outer.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    outer
}

/// The same command where all of the cgroups are version 2: crun refuses a mixture.
pub(super) fn on_pure_cgroup2(command: Command) -> Command {
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return command;
    }
    within_mounts("umount -R /sys/fs/cgroup\nmount -t cgroup2 cgroup2 /sys/fs/cgroup", &command)
}

/// A script that brings `/dev/mqueue`, which systemd mounts and a machine without it need not have: engines bind it
/// for `--ipc=host`.
pub(super) fn with_message_queues(host: &Host) -> String {
    if Path::new("/dev/mqueue").is_dir() {
        return "true".to_owned();
    }
    format!(
        r#"dev={}/dev
mkdir -p "$dev"
mount -t tmpfs -o mode=755 tmpfs "$dev"
for node in null zero full random urandom tty fuse; do
  [ -e "/dev/$node" ] || continue
  touch "$dev/$node"
  mount --bind "/dev/$node" "$dev/$node"
done
mkdir "$dev/pts" "$dev/shm" "$dev/mqueue"
mount --rbind /dev/pts "$dev/pts"
mount --rbind /dev/shm "$dev/shm"
mount -t mqueue mqueue "$dev/mqueue"
ln -s pts/ptmx "$dev/ptmx"
ln -s /proc/self/fd "$dev/fd"
mount --rbind "$dev" /dev"#,
        host.path().display()
    )
}
