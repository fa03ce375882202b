//! What a session would leave behind on the machine. A session that is closed leaves nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::engine::Session;
use crate::processes;

/// Closes the session, and says what is still there.
pub(crate) fn of(session: Session, engine: &str) -> Option<String> {
    let (path, name) = (session.host.path().to_owned(), session.host.name());
    drop(session);
    // an engine's own helpers may still be at it
    let gone = || processes::find(|process| process.mentions(&path)).is_empty();
    processes::wait_for(Duration::from_secs(3), gone);
    let removed = || {
        remove_empty_cgroups(&name);
        cgroups(&name).is_empty()
    };
    processes::wait_for(Duration::from_secs(3), removed);
    let mut left = Vec::new();
    for process in processes::find(|process| process.mentions(&path)) {
        left.push(format!("process {} ({})", process.pid, process.command_line()));
    }
    left.extend(mounts(&path).into_iter().map(|mount| format!("mount {mount}")));
    left.extend(cgroups(&name).into_iter().map(|cgroup| format!("cgroup {}", cgroup.display())));
    left.extend(Some(path).filter(|path| path.exists()).map(|path| format!("directory {}", path.display())));
    (!left.is_empty()).then(|| format!("{engine}: {}", left.join(", ")))
}

/// The mounts at and below a directory.
pub(crate) fn mounts(path: &Path) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| Path::new(point).starts_with(path)).map(ToOwned::to_owned).collect()
}

/// The cgroups of that name in every hierarchy.
fn cgroups(name: &str) -> Vec<PathBuf> {
    let hierarchies =
        fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let all = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]).map(|hierarchy| hierarchy.join(name));
    all.filter(|path| path.is_dir()).collect()
}

/// Engines leave the empty cgroup that they were told to put their containers in.
fn remove_empty_cgroups(name: &str) {
    for cgroup in cgroups(name) {
        remove_empty(&cgroup);
    }
}

fn remove_empty(cgroup: &Path) {
    let children = fs::read_dir(cgroup).into_iter().flatten().flatten().map(|entry| entry.path());
    children.filter(|path| path.is_dir()).for_each(|child| remove_empty(&child));
    let _ = fs::remove_dir(cgroup);
}
