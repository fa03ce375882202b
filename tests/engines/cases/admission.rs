//! Many containers on one host, and containers that are started again.

use std::time::Duration;

use super::Case;
use super::share::Holder;
use crate::container::{Container, QUARTER};
use crate::engine::Session;
use crate::processes;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::only(
            &["podman-precreate", "nerdctl-runtime"],
            "twelve_fill_two_gpus_and_the_thirteenth_is_refused_until_one_ends",
            twelve,
        ),
        Case::only(
            &["podman-precreate", "podman-runtime", "nerdctl-runtime"],
            "a_container_that_is_started_again_has_one_share_or_is_refused",
            started_again,
        ),
        Case::only(&["podman-runtime"], "a_restart_policy_gives_each_run_its_share_again", retried),
        Case::only(&["runc"], "a_pods_init_container_gives_its_share_back_before_the_main_one_starts", pod),
    ]
}

/// Six of them to a GPU.
const SIXTH: [(&str, &str); 2] = [("oci-mps/memory", "23GiB"), ("oci-mps/threads", "10")];

fn twelve(session: &mut Session) {
    let mut holders: Vec<Holder> = Vec::new();
    let mut names = Vec::new();
    for _ in 0..12 {
        holders.push(Holder::start(session, &SIXTH));
        names.push(session.last_id());
    }
    let shares = session.host.shares();
    assert_eq!(shares.len(), 12, "{shares:?}");
    let engine = session.kind.name.split('-').next().expect("a name has a beginning");
    for name in &names {
        let found = shares.iter().find(|share| share["name"] == name.as_str());
        let share = found.unwrap_or_else(|| panic!("{name} is not named in {shares:?}"));
        assert_eq!(share["engine"], engine);
    }
    let table = session.host.oci_mps(&["shares"]);
    assert_eq!(table.matches("141,312/143,771 MiB").count(), 2, "{table}");

    let refused = session.run(&Container::probe().with(&SIXTH));
    assert!(!refused.status.success(), "{refused}");
    let told = session.told(&refused).replace('\\', "");
    for words in [
        "oci-mps: GPU 0 (NVIDIA H200) has 1,947 MiB left to share, oci-mps/memory asks for 23,552 MiB (",
        "; GPU 1 (NVIDIA H200) has 1,947 MiB left to share, oci-mps/memory asks for 23,552 MiB (",
        " has 23,552 MiB, ",
        ", 3 more the rest); 1,947 MiB would fit; see 'oci-mps shares'",
    ] {
        assert!(told.contains(words), "{words:?} is not in {told}");
    }
    assert_eq!(session.host.shares().len(), 12, "a refusal changes nobody's share");

    holders.pop().expect("twelve").end();
    let admitted = session.run(&Container::probe().with(&SIXTH));
    assert_eq!(admitted.cu_init(), 805, "its place is free: {admitted}");
    for holder in holders {
        holder.end();
    }
}

fn started_again(session: &mut Session) {
    let detached =
        Container { detached: true, ..Container::shell("trap 'exit 0' TERM; while :; do sleep 0.1; done") };
    let outcome = session.run(&detached.with(&QUARTER));
    assert!(outcome.status.success(), "{outcome}");
    let id = session.last_id();
    let first = only_share(session);

    say(session, &["restart", "--time", "2", &id]);
    let second = only_share(session);
    assert_ne!(second["process"], first["process"], "it was not started again");
    for what in ["gpus", "threads_percent", "id"] {
        assert_eq!(second[what], first[what], "the share is another one");
    }

    say(session, &["stop", "--time", "2", &id]);
    // nerdctl keeps a stopped container's task, so its poststop comes with the next start: until then its record is one
    // of the dead, which is dropped as soon as somebody needs the room
    nobody_has_a_share(session);
    let everything = [("oci-mps/memory", "140000MiB"), ("oci-mps/gpu", "auto:2")];
    let holder = Holder::start(session, &everything);
    let before = session.host.shares();
    let refused = session.ask(&["start", &id]);
    assert!(!refused.status.success(), "there was no room: {refused}");
    let told = session.told(&refused).replace('\\', "");
    assert!(told.contains("GPU 0 (NVIDIA H200) has 3,259 MiB left to share"), "{told}");
    assert_eq!(session.host.shares(), before);
    holder.end();
    nobody_has_a_share(session);

    say(session, &["start", &id]);
    let third = only_share(session);
    assert_eq!(third["gpus"], first["gpus"]);
    let said = session.host.try_oci_mps(&["shares", "release", third["id"].as_str().unwrap_or_default()]);
    assert!(said.contains("still runs") && said.contains("stop it first"), "{said}");
    say(session, &["rm", "--force", &id]);
}

/// Three runs: the first and two more.
fn retried(session: &mut Session) {
    let out = session.host.path().join("runs");
    std::fs::create_dir(&out).expect("a directory");
    let script = "cuda-probe --timeout 10 >> /out/seen; env | grep MEM_LIMIT >> /out/seen; exit 3";
    let failing = Container { detached: true, retries: Some(2), ..Container::shell(script) };
    let outcome = session.run(&failing.mount(&out, "/out").with(&QUARTER));
    assert!(outcome.status.success(), "{outcome}");
    let id = session.last_id();
    let seen = || std::fs::read_to_string(out.join("seen")).unwrap_or_default();
    let one = "{\"cuInit\":805}\nCUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M\n";
    assert!(processes::wait_for(Duration::from_secs(20), || seen() == one.repeat(3)), "{}", seen());
    nobody_has_a_share(session);
    // podman cleans up after the last run in a process of its own
    let is_clean = || session.host.records() == Some(0);
    assert!(processes::wait_for(Duration::from_secs(5), is_clean), "a run left its record");
    say(session, &["rm", "--force", &id]);
}

/// What containerd's CRI plugin (1.6 and 2.x) and CRI-O write beside a pod's own annotations.
const CONTAINERD: [&str; 6] = [
    "io.kubernetes.cri.container-type",
    "io.kubernetes.cri.container-name",
    "io.kubernetes.cri.sandbox-name",
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.cri.image-name",
    "containerd (CRI)",
];
const CRIO: [&str; 6] = [
    "io.kubernetes.cri-o.ContainerType",
    "io.kubernetes.container.name",
    "io.kubernetes.pod.name",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.cri-o.ImageName",
    "cri-o",
];

/// All of GPU 0, for each of the pod's containers in its turn.
fn pod(session: &mut Session) {
    for [kind, name, pod, namespace, image, engine] in [CONTAINERD, CRIO] {
        let asks = [("oci-mps/memory", "140000MiB"), ("oci-mps/gpu", "0")];
        let of_pod = |container: &'static str| {
            let own = [
                (kind, "container"),
                (name, container),
                (pod, "train"),
                (namespace, "ml"),
                (image, "registry.example.com/t:1"),
            ];
            [&own[..], &asks[..]].concat()
        };
        let sandbox = [&[(kind, "sandbox"), (pod, "train"), (namespace, "ml")], &asks[..]].concat();
        let outcome = session.run(&Container::probe().with(&sandbox));
        assert_eq!(outcome.cu_init(), 100, "a sandbox is never touched: {outcome}");
        assert_eq!(session.host.records(), Some(0));

        let outcome = session.run(&Container::probe().with(&of_pod("init")));
        assert_eq!(outcome.cu_init(), 805, "{outcome}");
        assert_eq!(session.host.records(), Some(0), "the init container is gone, and its share with it");

        let main = Holder::start(session, &of_pod("main"));
        let share = only_share(session);
        assert_eq!(share["name"], "ml/train/main");
        assert_eq!(share["engine"], engine);
        assert_eq!(share["image"], "registry.example.com/t:1");
        let refused = session.run(&Container::probe().with(&of_pod("second")));
        let told = session.told(&refused);
        assert!(told.contains("(ml/train/main has 140,000 MiB); there is room on GPU 1"), "{told}");
        main.end();
    }
}

fn say(session: &mut Session, words: &[&str]) {
    let outcome = session.ask(words);
    assert!(outcome.status.success(), "{words:?}: {outcome}");
}

fn nobody_has_a_share(session: &Session) {
    let is_free = || session.host.shares().is_empty();
    assert!(processes::wait_for(Duration::from_secs(3), is_free), "{:?}", session.host.shares());
}

fn only_share(session: &Session) -> serde_json::Value {
    let attached = || {
        let shares = session.host.shares();
        shares.len() == 1 && shares[0]["state"] == "attached"
    };
    assert!(processes::wait_for(Duration::from_secs(5), attached), "{:?}", session.host.shares());
    assert_eq!(session.host.records(), Some(1));
    session.host.shares().remove(0)
}
