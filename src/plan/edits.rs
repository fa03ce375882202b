//! A share to the edits that give it: variables, the socket, the IPC namespace, the hooks.

use std::path::Path;

use oci_spec::runtime::{Hook, HookBuilder, Mount, MountBuilder};

use super::wanted::Wanted;
use super::{Facts, Refusal, Site};
use crate::layout::{TOKEN_ANNOTATION, env};
use crate::share::Share;
use crate::size::{Field, Ipc};
use crate::spec::{Document, Edit, Stage};

/// How long an engine waits for a hook of ours. The hooks themselves give up earlier.
const HOOK_TIMEOUT_SECONDS: i64 = 10;

/// Everything that has to change.
pub(super) fn of(
    document: &Document,
    share: &Share,
    wanted: &Wanted,
    facts: Facts<'_>,
) -> Result<Vec<Edit>, Refusal> {
    let pipe_dir = &facts.config.container.pipe_dir;
    refuse_hidden_socket(document, pipe_dir)?;
    let mut edits = environment(document, share, pipe_dir)?;
    edits.extend(ipc(document, wanted, facts.site)?);
    edits.push(Edit::Mount(Box::new(socket(&facts.site.client_dir, pipe_dir))));
    for stage in [Stage::CreateRuntime, Stage::Poststop] {
        edits.push(Edit::AddHook { stage, hook: Box::new(hook(stage, facts)) });
    }
    edits.push(Edit::Annotate { key: TOKEN_ANNOTATION.to_owned(), value: share.token.to_string() });
    Ok(edits)
}

/// What the container's processes are told, and nothing of MPS that somebody else told them.
fn environment(document: &Document, share: &Share, pipe_dir: &Path) -> Result<Vec<Edit>, Refusal> {
    let uuids: Vec<&str> = share.gpus.iter().map(|part| part.gpu.as_str()).collect();
    let uuids = uuids.join(",");
    // By ordinal in the container's own numbering, which CUDA_VISIBLE_DEVICES makes: an entry for a GPU that the
    // process does not see voids the whole limit (measured, driver 580.159).
    let limits: Vec<String> = share
        .gpus
        .iter()
        .enumerate()
        .map(|(ordinal, part)| format!("{ordinal}={}", part.memory.split(share.processes).as_mps_limit()))
        .collect();
    let mut ours = vec![
        (env::CUDA_DEVICES, uuids.clone()),
        (env::PIPE_DIRECTORY, pipe_dir.to_string_lossy().into_owned()),
        (env::MEMORY_LIMIT, limits.join(",")),
        (env::THREAD_PERCENTAGE, share.threads.to_string()),
        (env::PRIORITY, share.priority.as_mps().to_owned()),
    ];
    let present = document.env()?;
    let toolkit_reads = |(name, value): &(&str, &str)| {
        *name == env::TOOLKIT_DEVICES && !matches!(*value, "" | "none" | "void")
    };
    if present.iter().any(toolkit_reads) {
        ours.push((env::TOOLKIT_DEVICES, uuids));
    }
    let is_foreign =
        |name: &&str| name.starts_with(env::MPS_PREFIX) && !ours.iter().any(|(known, _)| known == name);
    let foreign = present.iter().map(|(name, _)| *name).filter(is_foreign);
    let mut edits: Vec<Edit> = foreign.map(|name| Edit::RemoveEnv { name: name.to_owned() }).collect();
    edits.extend(ours.into_iter().map(|(name, value)| Edit::SetEnv { name: name.to_owned(), value }));
    Ok(edits)
}

/// The host's IPC namespace, written as the engine's own `--ipc=host` would write it.
fn ipc(document: &Document, wanted: &Wanted, site: &Site) -> Result<Vec<Edit>, Refusal> {
    let key = || wanted.name(Field::Ipc);
    let namespace = match (wanted.ipc, document.namespace("ipc")) {
        (Ipc::Private, _) | (Ipc::Host, None) => return Ok(Vec::new()),
        (Ipc::Host, Some(namespace)) => namespace,
    };
    if wanted.in_pod {
        return if wanted.ipc_is_asked { Err(Refusal::HostIpcInPod { key: key() }) } else { Ok(Vec::new()) };
    }
    if let Some(path) = namespace.path {
        let joined = || Refusal::HostIpcJoined { key: key(), path: path.to_owned() };
        return if wanted.ipc_is_asked { Err(joined()) } else { Ok(Vec::new()) };
    }
    if let Some(sysctl) = document.sysctls().find(|name| is_ipc_sysctl(name)) {
        return Err(Refusal::IpcSysctl { sysctl: sysctl.to_owned() });
    }
    let mut edits = vec![Edit::LeaveNamespace { kind: "ipc" }];
    let shm = document.mounts().find(|mount| is_at(mount.destination, "/dev/shm"));
    // podman binds a directory of the container's, and for --ipc=host /dev/shm with the same options; nerdctl and ctr
    // mount a tmpfs, and for --ipc=host nerdctl binds the host's
    let is_podmans = shm.as_ref().is_some_and(|shm| shm.kind == Some("bind"));
    let shm_options = match shm {
        Some(shm) if is_podmans => shm.options.iter().map(|option| (*option).to_owned()).collect(),
        _ => owned(&["rbind", "nosuid", "noexec", "nodev"]),
    };
    edits.push(bind("/dev/shm", shm_options));
    edits.extend(message_queues(document, is_podmans, site));
    Ok(edits)
}

/// The message queues of the host's IPC namespace. A mount of type `mqueue` shows them too, but may not be made in a
/// user namespace that does not own the IPC namespace, and a host without `/dev/mqueue` has nothing to bind.
fn message_queues(document: &Document, is_podmans: bool, site: &Site) -> Option<Edit> {
    if !document.mounts().any(|mount| is_at(mount.destination, "/dev/mqueue")) {
        return None;
    }
    let may_mount = document.namespace("user").is_none() && !site.in_user_namespace;
    match (may_mount, site.has_message_queues) {
        (true, _) if is_podmans => None,
        (true, false) => None,
        (_, true) if is_podmans => {
            Some(bind("/dev/mqueue", owned(&["bind", "nosuid", "noexec", "nodev", "rw", "rprivate"])))
        }
        (_, true) => Some(bind("/dev/mqueue", owned(&["rbind", "nosuid", "noexec", "nodev"]))),
        (false, false) => Some(Edit::RemoveMount { destination: "/dev/mqueue" }),
    }
}

/// The settings of which each IPC namespace has its own (runc `libcontainer/configs/validate`).
fn is_ipc_sysctl(name: &str) -> bool {
    let name = name.replace('/', ".");
    name == "kernel.sem"
        || ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|prefix| name.starts_with(prefix))
}

/// A mount below our directory would lie over the socket, and CUDA would silently run without MPS.
fn refuse_hidden_socket(document: &Document, pipe_dir: &Path) -> Result<(), Refusal> {
    let below =
        |destination: &str| Path::new(destination).starts_with(pipe_dir) && !is_at(destination, pipe_dir);
    match document.mounts().find(|mount| below(mount.destination)) {
        Some(mount) => Err(Refusal::HiddenSocket {
            destination: mount.destination.to_owned(),
            pipe_dir: pipe_dir.display().to_string(),
        }),
        None => Ok(()),
    }
}

fn is_at(destination: &str, path: impl AsRef<Path>) -> bool {
    Path::new(destination) == path.as_ref()
}

fn bind(path: &str, options: Vec<String>) -> Edit {
    Edit::Mount(Box::new(mount(path.as_ref(), path.as_ref(), options)))
}

fn socket(client_dir: &Path, pipe_dir: &Path) -> Mount {
    mount(client_dir, pipe_dir, owned(&["bind", "ro", "nosuid", "nodev", "noexec", "rprivate"]))
}

fn mount(source: &Path, destination: &Path, options: Vec<String>) -> Mount {
    let mount = MountBuilder::default().destination(destination).typ("bind").source(source).options(options);
    mount.build().expect("a mount needs no more than a destination")
}

fn hook(stage: Stage, facts: Facts<'_>) -> Hook {
    let args = ["oci-mps", "hook", stage.key()];
    let hook = HookBuilder::default()
        .path(&facts.site.hook_program)
        .args(owned(&args))
        .env(facts.site.hook_env.clone())
        .timeout(HOOK_TIMEOUT_SECONDS);
    hook.build().expect("a hook needs no more than a path")
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
