//! The way out of the engine's cgroup: the root of every hierarchy that this process is in.

use std::fs::{self, File};
use std::path::PathBuf;

/// Open `cgroup.procs` files; a process that writes `0` to each has left its cgroups. Best effort: those that cannot
/// be opened, mostly since we are not root, are not among them.
pub(super) fn exits() -> Vec<File> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let roots = roots(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    roots.iter().filter_map(|path| File::options().write(true).open(path).ok()).collect()
}

/// `/proc/self/cgroup` and `/proc/self/mountinfo` (cgroups(7), proc(5)), to the `cgroup.procs` at the root of each
/// hierarchy where we are not there already.
fn roots(cgroups: &str, mounts: &str) -> Vec<PathBuf> {
    let mounts: Vec<Mount<'_>> = mounts.lines().filter_map(Mount::parse).collect();
    let mut roots = Vec::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if path == "/" {
            continue;
        }
        let found = mounts.iter().find(|mount| mount.holds(id, controllers));
        roots.extend(found.map(|mount| PathBuf::from(mount.point).join("cgroup.procs")));
    }
    roots
}

/// The mount of a whole hierarchy.
struct Mount<'a> {
    point: &'a str,
    unified: bool,
    options: &'a str,
}

impl<'a> Mount<'a> {
    /// `40 31 0:37 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids`
    fn parse(line: &'a str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut file_system = file_system.split(' ');
        let unified = match file_system.next()? {
            "cgroup2" => true,
            "cgroup" => false,
            _ => return None,
        };
        (root == "/").then_some(Self { point, unified, options: file_system.nth(1).unwrap_or_default() })
    }

    fn holds(&self, id: &str, controllers: &str) -> bool {
        if id == "0" {
            return self.unified;
        }
        !self.unified && controllers.split(',').all(|one| self.options.split(',').any(|option| option == one))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hierarchy_is_left_at_its_root() {
        let mounts = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /part /srv/part rw,relatime shared:5 - cgroup cgroup rw,memory
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:5 - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
        let cgroups = "9:name=systemd:/a\n4:memory:/process_api/1:2\n1:cpu,cpuacct:/\n0::/b\n7:gone:/c\n";
        let expected = ["systemd", "memory", "unified"]
            .map(|name| PathBuf::from(format!("/sys/fs/cgroup/{name}/cgroup.procs")));
        assert_eq!(roots(cgroups, mounts), expected);
        assert_eq!(roots("garbage\n0::/\n", mounts), Vec::<PathBuf>::new());
    }
}
