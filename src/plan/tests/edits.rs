//! What the spec is given: variables, the socket, the IPC namespace, the hooks.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

#[test]
fn the_environment_is_exactly_what_the_contract_promises() {
    let env = Case::default().env(&QUARTER);
    assert_eq!(
        env,
        [
            "PATH=/bin",
            &format!("CUDA_VISIBLE_DEVICES={H200}"),
            "CUDA_MPS_PIPE_DIRECTORY=/run/oci-mps",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
            "CUDA_MPS_CLIENT_PRIORITY=0",
        ]
    );
}

#[test]
fn two_gpus_are_limited_by_the_containers_own_numbers() {
    let env = Case::default().env(&[("oci-mps/memory", "8GiB,25%"), ("oci-mps/gpu", "1,0")]);
    assert!(env.contains(&format!("CUDA_VISIBLE_DEVICES={SECOND},{H200}")), "{env:?}");
    assert!(env.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M,1=35942M".to_owned()), "{env:?}");
}

#[test]
fn the_memory_is_split_over_the_processes_and_never_rounded_up() {
    let env = Case::default().env(&[("oci-mps/memory", "8GiB"), ("oci-mps/processes", "3")]);
    assert!(env.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2730M".to_owned()), "{env:?}");
}

#[test]
fn what_the_image_says_of_mps_is_replaced() {
    let mut case = Case::default();
    case.spec["process"]["env"] = json!([
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=banana",
        "CUDA_VISIBLE_DEVICES=7",
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING=1",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=999G",
        "NVIDIA_VISIBLE_DEVICES=all",
        "CUDA_CACHE_PATH=/c",
    ]);
    assert_eq!(
        case.env(&QUARTER),
        [
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M",
            &format!("CUDA_VISIBLE_DEVICES={H200}"),
            &format!("NVIDIA_VISIBLE_DEVICES={H200}"),
            "CUDA_CACHE_PATH=/c",
            "CUDA_MPS_PIPE_DIRECTORY=/run/oci-mps",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
            "CUDA_MPS_CLIENT_PRIORITY=0",
        ]
    );
}

#[test]
fn podmans_host_ipc_is_written_as_podman_writes_it() {
    let edited = Case::default().edited(&QUARTER);
    assert_eq!(edited["linux"]["namespaces"], json!([{"type": "pid"}]));
    assert_eq!(edited["mounts"][0]["type"], "mqueue");
    assert_eq!(
        edited["mounts"][1],
        json!({"destination": "/dev/shm", "type": "bind", "source": "/dev/shm",
               "options": ["bind", "rprivate", "nosuid", "noexec", "nodev"]})
    );
}

#[test]
fn nerdctls_host_ipc_is_written_as_nerdctl_writes_it() {
    let edited = Case { spec: nerdctl(), ..Case::default() }.edited(&QUARTER);
    for (mount, path) in [(0, "/dev/shm"), (1, "/dev/mqueue")] {
        assert_eq!(
            edited["mounts"][mount],
            json!({"destination": path, "type": "bind", "source": path,
                   "options": ["rbind", "nosuid", "noexec", "nodev"]})
        );
    }
}

/// What becomes of `/dev/mqueue`: by engine, user namespace (the engine's or the container's) and host.
#[rstest]
#[case(podman(), None, true, Some(("mqueue", "mqueue")))]
#[case(podman(), None, false, Some(("mqueue", "mqueue")))]
#[case(podman(), Some("engine"), true, Some(("bind", "/dev/mqueue")))]
#[case(podman(), Some("container"), true, Some(("bind", "/dev/mqueue")))]
#[case(podman(), Some("engine"), false, None)]
#[case(nerdctl(), None, true, Some(("bind", "/dev/mqueue")))]
#[case(nerdctl(), None, false, Some(("mqueue", "mqueue")))]
#[case(nerdctl(), Some("container"), true, Some(("bind", "/dev/mqueue")))]
#[case(nerdctl(), Some("container"), false, None)]
fn message_queues_are_the_hosts_wherever_that_can_be(
    #[case] mut before: Value,
    #[case] user_namespace: Option<&str>,
    #[case] on_host: bool,
    #[case] after: Option<(&str, &str)>,
) {
    if user_namespace == Some("container") {
        before["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "user"}));
    }
    let (config, inventory) = (HostConfig::default(), host());
    let in_user_namespace = user_namespace == Some("engine");
    let site = Site { has_message_queues: on_host, in_user_namespace, ..site() };
    let facts = Facts {
        config: &config,
        inventory: &inventory,
        others: &[],
        held: None,
        token: &token(0),
        site: &site,
    };
    let request = Request::read(&QUARTER, Aliases::default()).unwrap().unwrap();
    let mut document = spec(&before);
    document.apply(&plan(&document, &request, facts).unwrap().edits).unwrap();
    let edited: Value = serde_json::from_slice(&document.to_bytes()).unwrap();
    let mount =
        edited["mounts"].as_array().unwrap().iter().find(|mount| mount["destination"] == "/dev/mqueue");
    let mount = mount.map(|mount| (mount["type"].as_str().unwrap(), mount["source"].as_str().unwrap()));
    assert_eq!(mount, after);
}

#[test]
fn the_socket_comes_last_and_read_only() {
    let edited = Case::default().edited(&QUARTER);
    assert_eq!(
        edited["mounts"].as_array().unwrap().last().unwrap(),
        &json!({"destination": "/run/oci-mps", "type": "bind", "source": "/run/oci-mps/client",
                "options": ["bind", "ro", "nosuid", "nodev", "noexec", "rprivate"]})
    );
}

#[test]
fn both_hooks_have_an_environment_of_their_own() {
    let edited = Case::default().edited(&QUARTER);
    for stage in ["createRuntime", "poststop"] {
        assert_eq!(
            edited["hooks"][stage],
            json!([{"path": "/usr/bin/oci-mps-runtime", "args": ["oci-mps", "hook", stage],
                    "env": ["PATH=/bin"], "timeout": 10}])
        );
    }
    assert_eq!(edited["annotations"]["oci-mps/.token"], token(0).as_str());
}

#[test]
fn a_private_ipc_namespace_is_left_as_it_is() {
    for annotations in [&[("oci-mps/memory", "8GiB"), ("oci-mps/ipc", "private")][..], &QUARTER] {
        let config = if annotations.len() == 2 && annotations[1].0 == "oci-mps/ipc" {
            ""
        } else {
            "[container]\nipc='private'"
        };
        let edited = Case { config, ..Case::default() }.edited(annotations);
        assert_eq!(edited["linux"]["namespaces"], podman()["linux"]["namespaces"]);
        assert_eq!(edited["mounts"][1], podman()["mounts"][1]);
    }
}

fn pod_member<'a>(keys: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&[("io.kubernetes.cri.container-type", "container"), ("io.kubernetes.cri.container-name", "c")], keys]
        .concat()
}

#[test]
fn in_a_pod_and_in_a_joined_namespace_the_setting_stands() {
    let mut case = Case::default();
    case.spec["linux"]["namespaces"] = json!([{"type": "ipc", "path": "/proc/1/ns/ipc"}]);
    for annotations in [pod_member(&QUARTER), QUARTER.to_vec()] {
        let edited = case.edited(&annotations);
        assert_eq!(edited["linux"]["namespaces"], case.spec["linux"]["namespaces"]);
        assert_eq!(edited["mounts"][1], podman()["mounts"][1]);
    }
    let asked = [&QUARTER[..], &[("oci-mps/ipc", "host")]].concat();
    let refused = case.plan(&asked).unwrap_err();
    assert!(refused.contains("oci-mps/ipc=host: the engine put this container into"), "{refused}");
    let refused = case.plan(&pod_member(&asked)).unwrap_err();
    assert!(refused.contains("set hostIPC: true in the pod"), "{refused}");
}

#[rstest]
#[case("kernel.shmmax")]
#[case("kernel.msgmni")]
#[case("kernel.sem")]
#[case("fs.mqueue.msg_max")]
#[case("fs/mqueue/msg_max")]
fn ipc_sysctls_are_refused_by_name_under_host_ipc_only(#[case] sysctl: &str) {
    let mut case = Case::default();
    case.spec["linux"]["sysctl"] = json!({"net.core.somaxconn": "1", sysctl: "1"});
    let refused = case.plan(&QUARTER).unwrap_err();
    assert!(refused.contains(&format!("the sysctl {sysctl} cannot be set")), "{refused}");
    let private = [&QUARTER[..], &[("oci-mps/ipc", "private")]].concat();
    case.plan(&private).unwrap();
}

#[test]
fn a_mount_over_the_socket_is_refused() {
    let mut case = Case::default();
    case.spec["mounts"]
        .as_array_mut()
        .unwrap()
        .push(json!({"destination": "/run/oci-mps/control", "type": "bind"}));
    let refused = case.plan(&QUARTER).unwrap_err();
    assert!(refused.starts_with("the mount at /run/oci-mps/control would hide the MPS socket"), "{refused}");
}
