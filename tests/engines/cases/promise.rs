//! What an annotated container is given, and nothing else.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::{Case, On, Verdict, spec};
use crate::container::{Container, QUARTER};
use crate::engine::Session;
use crate::host::{Driver, GPUS, Settings};

/// `cuInit` where the daemon is reached: `CUDA_ERROR_MPS_CONNECTION_FAILED`, since a server needs a GPU.
const REACHES_MPS: i64 = 805;
/// `cuInit` where it is not: `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: i64 = 100;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::every("cuinit_reaches_mps", reaches_mps),
        Case::every("cuinit_reaches_mps_of_driver_535", reaches_mps_535),
        Case {
            name: "an_ordinary_user_in_the_container_reaches_mps".to_owned(),
            on: On::Every,
            check: Box::new(an_ordinary_user),
        },
        Case::only(
            &["runc", "podman-precreate", "podman-runtime"],
            "root_of_a_user_namespace_reaches_mps",
            root_of_a_user_namespace,
        ),
        Case::every("without_annotations_nothing_happens", nothing_happens),
        Case::every("the_environment_is_exactly_as_promised", environment),
        Case::every("the_ipc_namespace_is_the_hosts", ipc_of_the_host),
        Case::every("a_private_ipc_namespace_stays_private", ipc_private),
        Case::every("the_bind_is_read_only_and_holds_nothing_but_control", the_bind),
        Case::every("root_in_the_container_cannot_change_a_default_or_stop_the_daemon", no_privileges),
        Case::only(&["runc"], "driver_535_does_not_refuse_its_defaults_known_limit", privileges_of_535),
    ]
}

fn reaches_mps(session: &mut Session) {
    let outcome = session.run(&Container::probe().with(&QUARTER));
    assert_eq!(outcome.cu_init(), REACHES_MPS, "{outcome}");
    assert!(session.host.daemon().is_some(), "the first container starts the daemon, which outlives it");
    let outcome = session.run(&Container::probe().with(&QUARTER));
    assert_eq!(outcome.cu_init(), REACHES_MPS, "the second container: {outcome}");
}

fn reaches_mps_535(session: &mut Session) {
    session.host.configure(&Settings { driver: Driver::D535, ..Settings::default() });
    let outcome = session.run(&Container::probe().with(&QUARTER));
    assert_eq!(outcome.cu_init(), REACHES_MPS, "{outcome}");
}

fn an_ordinary_user(session: &mut Session) -> Verdict {
    let container = Container { user: Some(1000), ..Container::probe().with(&QUARTER) };
    if let Some(reason) = session.engine.cannot(&container) {
        return Verdict::Skipped(reason.to_owned());
    }
    let outcome = session.run(&container);
    assert_eq!(outcome.cu_init(), REACHES_MPS, "{outcome}");
    Verdict::Shown
}

fn root_of_a_user_namespace(session: &mut Session) {
    let outcome = session.run(&Container::probe().with(&QUARTER).in_a_user_namespace());
    assert_eq!(outcome.cu_init(), REACHES_MPS, "{outcome}");
    let outcome =
        session.run(&Container::shell("cat /proc/self/uid_map; id -u").with(&QUARTER).in_a_user_namespace());
    let words: Vec<&str> = outcome.output().split_whitespace().collect();
    assert_eq!(words, ["0", "100000", "65536", "0"], "{outcome}");
}

fn nothing_happens(session: &mut Session) {
    let outcome = session.run(&Container::probe());
    assert_eq!(outcome.cu_init(), NO_DEVICE, "{outcome}");
    let config = outcome.config();
    assert!(config["hooks"]["createRuntime"].as_array().is_none_or(|hooks| !hooks.iter().any(spec::is_ours)));
    assert!(session.host.daemon().is_none(), "nobody asked, and a daemon runs");
    assert!(!session.host.state().join("shares.json").exists(), "nobody asked, and there is a ledger");
}

/// What the user or the image says of MPS is replaced, and the rest is kept.
fn environment(session: &mut Session) {
    let users = [
        "KEPT=by user",
        "CUDA_VISIBLE_DEVICES=7",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1T",
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING=1",
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute",
    ];
    let plain = session.run(&Container::shell("env").env(&users));
    let given = session.run(&Container::shell("env").env(&users).with(&QUARTER));
    let (ours, others) = split(given.output());
    let devices = format!("CUDA_VISIBLE_DEVICES={}", GPUS[0]);
    let toolkits = format!("NVIDIA_VISIBLE_DEVICES={}", GPUS[0]);
    assert_eq!(
        ours,
        [
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
            "CUDA_MPS_CLIENT_PRIORITY=0",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M",
            "CUDA_MPS_PIPE_DIRECTORY=/run/oci-mps",
            &devices,
            "NVIDIA_DRIVER_CAPABILITIES=compute",
            &toolkits,
        ]
    );
    assert!(others.contains(&"KEPT=by user"), "{others:?}");
    assert_eq!(others, split(plain.output()).1);
}

/// The variables of CUDA and of NVIDIA's toolkit, and the others but for the container's own name; both sorted.
fn split(env: &str) -> (Vec<&str>, Vec<&str>) {
    let mut lines: Vec<&str> = env.lines().filter(|line| !line.starts_with("HOSTNAME=")).collect();
    lines.sort_unstable();
    lines.into_iter().partition(|line| line.starts_with("CUDA_") || line.starts_with("NVIDIA_"))
}

const IPC: &str = "readlink /proc/self/ns/ipc; stat -c %d /dev/shm";

fn ipc_of_the_host(session: &mut Session) {
    let outcome = session.run(&Container::shell(IPC).with(&QUARTER));
    let shm = fs::metadata("/dev/shm").unwrap().dev();
    assert_eq!(outcome.output(), format!("{}\n{shm}", ipc_namespace()), "namespace and /dev/shm: {outcome}");
}

fn ipc_private(session: &mut Session) {
    let private = [("oci-mps/ipc", "private")];
    let outcome = session.run(&Container::shell(IPC).with(&QUARTER).with(&private));
    let shm = fs::metadata("/dev/shm").unwrap().dev().to_string();
    let own: Vec<&str> = outcome.output().lines().collect();
    assert!(own[0] != ipc_namespace() && own[1] != shm, "{outcome}");
    let outcome = session.run(&Container::probe().with(&QUARTER).with(&private));
    assert_eq!(outcome.cu_init(), REACHES_MPS, "{outcome}");
}

fn ipc_namespace() -> String {
    fs::read_link("/proc/self/ns/ipc").unwrap().to_string_lossy().into_owned()
}

fn the_bind(session: &mut Session) {
    let script = "ls -A /run/oci-mps; grep ' /run/oci-mps ' /proc/self/mountinfo | cut -d ' ' -f 6; \
                  touch /run/oci-mps/new 2>&1; rm -f /run/oci-mps/control 2>&1; ls -A /run/oci-mps";
    let outcome = session.run(&Container::shell(script).with(&QUARTER));
    let lines: Vec<&str> = outcome.output().lines().collect();
    assert_eq!(lines.len(), 5, "{outcome}");
    assert_eq!((lines[0], lines[4]), ("control", "control"), "{outcome}");
    for option in ["ro", "nosuid", "nodev", "noexec"] {
        assert!(lines[1].split(',').any(|word| word == option), "{option}: {outcome}");
    }
    assert!(lines[2..4].iter().all(|line| line.contains("Read-only file system")), "{outcome}");
}

/// Everything that the daemon would take from its administrator.
const COMMANDS: &str = "for command in 'set_default_active_thread_percentage 9' \
     'set_default_device_pinned_mem_limit 0 1G' quit; do echo $command | timeout 5 nvidia-cuda-mps-control; done; \
     echo asked";
const DEFAULT: &str = "get_default_active_thread_percentage";
const LIMIT: &str = "get_default_device_pinned_mem_limit 0";

fn no_privileges(session: &mut Session) {
    session.run(&Container::probe().with(&QUARTER));
    let daemon = session.host.daemon().expect("a daemon");
    let defaults = [DEFAULT, LIMIT].map(|command| session.host.ask_daemon(command));
    let outcome = session.run(&Container::shell(COMMANDS).with(&QUARTER));
    assert!(outcome.output().ends_with("asked"), "{outcome}");
    assert_eq!(session.host.daemon(), Some(daemon), "the daemon was stopped: {outcome}");
    let now = [DEFAULT, LIMIT].map(|command| session.host.ask_daemon(command));
    assert_eq!(now, defaults, "a container changed the host's defaults: {outcome}");
    // the same words from the administrator are heard, so that they were the right ones
    session.host.ask_daemon("set_default_active_thread_percentage 9");
    assert_eq!(session.host.ask_daemon(DEFAULT), "9.0");
}

fn privileges_of_535(session: &mut Session) {
    session.host.configure(&Settings { driver: Driver::D535, ..Settings::default() });
    let outcome = session.run(&Container::shell(COMMANDS).with(&QUARTER));
    assert!(outcome.output().contains("9.0"), "{outcome}");
    assert_eq!(session.host.ask_daemon(DEFAULT), "9.0", "then 535 refuses too, and the facts are wrong");
    assert!(outcome.stdout.contains("Not enough privilege to execute quit command"), "{outcome}");
}
