use std::num::NonZeroU32;

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::config::Aliases;
use crate::gpu::Uuid;
use crate::quantity::Percentage;
use crate::share::Promised;
use crate::size::Priority;

mod edits;

const H200: &str = "GPU-00000000-1111-2222-3333-444444444444";
const SECOND: &str = "GPU-11111111-1111-2222-3333-444444444444";
const P40: &str = "GPU-22222222-1111-2222-3333-444444444444";

/// Two H200s.
fn host() -> Inventory {
    inventory(&[(H200, "NVIDIA H200", 143_771, "9.0", 132), (SECOND, "NVIDIA H200", 143_771, "9.0", 132)])
}

fn inventory(gpus: &[(&str, &str, u64, &str, u32)]) -> Inventory {
    let gpu = |(index, (uuid, name, memory, capability, sms)): (usize, &(&str, &str, u64, &str, u32))| {
        json!({"index": index, "uuid": uuid, "name": name, "memory_mib": memory,
               "compute_capability": capability, "sms": sms})
    };
    serde_json::from_value(json!({"gpu": gpus.iter().enumerate().map(gpu).collect::<Vec<_>>()})).unwrap()
}

fn spec(text: &Value) -> Document {
    Document::parse(&serde_json::to_vec(text).unwrap()).unwrap()
}

/// What podman writes for a container with an IPC namespace of its own, as far as it matters here.
fn podman() -> Value {
    json!({"process": {"env": ["PATH=/bin"]}, "mounts": [
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/dev/shm", "type": "bind", "source": "/var/lib/containers/userdata/shm",
         "options": ["bind", "rprivate", "nosuid", "noexec", "nodev"]}],
      "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}]}})
}

/// What nerdctl and ctr write.
fn nerdctl() -> Value {
    json!({"process": {"env": ["PATH=/bin"]}, "mounts": [
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
         "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]}],
      "linux": {"namespaces": [{"type": "ipc"}]}})
}

fn token(n: u32) -> Token {
    Token::try_from(format!("{n:032x}")).unwrap()
}

fn site() -> Site {
    Site {
        client_dir: "/run/oci-mps/client".into(),
        hook_program: "/usr/bin/oci-mps-runtime".into(),
        hook_env: vec!["PATH=/bin".to_owned()],
        has_message_queues: true,
        in_user_namespace: false,
    }
}

fn share(n: u32, gpu: &str, mib: u64, threads: &str, processes: u32) -> Share {
    Share {
        token: token(n),
        gpus: vec![GpuShare {
            gpu: Uuid::try_from(gpu.to_owned()).unwrap(),
            memory: MemoryQuantity::from_mib(mib),
        }],
        threads: threads.parse().unwrap(),
        processes: NonZeroU32::new(processes).unwrap(),
        priority: Priority::Normal,
    }
}

/// One situation: a container on a host.
struct Case<'a> {
    spec: Value,
    config: &'a str,
    inventory: Inventory,
    others: Vec<Share>,
}

impl Default for Case<'_> {
    fn default() -> Self {
        Self { spec: podman(), config: "", inventory: host(), others: Vec::new() }
    }
}

impl Case<'_> {
    fn plan(&self, annotations: &[(&str, &str)]) -> Result<Plan, String> {
        let request = Request::read(annotations, Aliases::default()).unwrap().expect("it asks");
        let config = HostConfig::parse(self.config).unwrap();
        let facts = Facts {
            config: &config,
            inventory: &self.inventory,
            others: &self.others.iter().collect::<Vec<_>>(),
            held: None,
            token: &token(0),
            site: &site(),
        };
        plan(&spec(&self.spec), &request, facts).map_err(|refusal| refusal.to_string())
    }

    /// The document with the plan's edits.
    fn edited(&self, annotations: &[(&str, &str)]) -> Value {
        let mut document = spec(&self.spec);
        document.apply(&self.plan(annotations).unwrap().edits).unwrap();
        serde_json::from_slice(&document.to_bytes()).unwrap()
    }

    fn env(&self, annotations: &[(&str, &str)]) -> Vec<String> {
        serde_json::from_value(self.edited(annotations)["process"]["env"].clone()).unwrap()
    }

    /// The GPUs by index, and the memory on each.
    fn placed(&self, annotations: &[(&str, &str)]) -> Result<Vec<(u32, u64)>, String> {
        let index = |uuid: &Uuid| self.inventory.gpus.iter().find(|gpu| gpu.uuid == *uuid).unwrap().index;
        let share = self.plan(annotations)?.share;
        Ok(share.gpus.iter().map(|part| (index(&part.gpu), part.memory.mib())).collect())
    }
}

const QUARTER: [(&str, &str); 2] = [("oci-mps/memory", "8GiB"), ("oci-mps/threads", "25")];

#[test]
fn auto_packs_and_spread_spreads() {
    let others = vec![share(1, SECOND, 8192, "25", 1)];
    let packed = Case { others: others.clone(), ..Case::default() };
    assert_eq!(packed.placed(&QUARTER).unwrap(), [(1, 8192)]);
    let spread = Case { others, config: "[policy]\nplacement='spread'", ..Case::default() };
    assert_eq!(spread.placed(&QUARTER).unwrap(), [(0, 8192)]);
    assert_eq!(
        Case::default().placed(&QUARTER).unwrap(),
        [(0, 8192)],
        "the lower index where both fit as well"
    );
}

#[test]
fn where_the_memory_is_equal_threads_and_then_client_slots_decide() {
    let others = |second: &str, processes| {
        vec![share(1, H200, 8192, "10", 1), share(2, SECOND, 8192, second, processes)]
    };
    for (others, packed) in [(others("50", 1), 1), (others("5", 2), 1), (others("10", 1), 0)] {
        let case = Case { others: others.clone(), ..Case::default() };
        assert_eq!(case.placed(&QUARTER).unwrap(), [(packed, 8192)]);
        if packed == 1 {
            let spread = Case { others, config: "[policy]\nplacement='spread'", ..Case::default() };
            assert_eq!(spread.placed(&QUARTER).unwrap(), [(0, 8192)]);
        }
    }
}

#[test]
fn several_amounts_find_their_gpus_hungriest_first() {
    let case = Case { others: vec![share(1, H200, 100_000, "25", 1)], ..Case::default() };
    let annotations = [("oci-mps/memory", "8GiB,80GiB"), ("oci-mps/gpu", "auto:2")];
    assert_eq!(case.placed(&annotations).unwrap(), [(0, 8192), (1, 81_920)]);
}

/// What the engine gave narrows the choice.
#[rstest]
#[case::by_variable(json!({"process": {"env": [format!("NVIDIA_VISIBLE_DEVICES={SECOND}")]}}), 1)]
#[case::by_index(json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=1"]}}), 1)]
#[case::by_node(json!({"process": {}, "linux": {"devices": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia1"}]}}), 1)]
#[case::by_bound_node(json!({"process": {}, "mounts": [{"destination": "/dev/nvidia1", "type": "bind"}]}), 1)]
#[case::nodes_are_what_counts(
    json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}, "linux": {"devices": [{"path": "/dev/nvidia1"}]}}), 1)]
#[case::all(json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}), 0)]
#[case::none(json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}), 0)]
fn auto_chooses_among_what_the_engine_gave(#[case] spec: Value, #[case] index: u32) {
    let case = Case { spec, ..Case::default() };
    assert_eq!(case.placed(&QUARTER).unwrap(), [(index, 8192)]);
    let other = (1 - index).to_string();
    let chosen = [&QUARTER[..], &[("oci-mps/gpu", &other)]].concat();
    if index == 1 {
        let refused = case.plan(&chosen).unwrap_err();
        assert!(
            refused.contains("oci-mps/gpu chooses GPU 0 (NVIDIA H200), but the engine gave"),
            "{refused}"
        );
    } else {
        case.plan(&chosen).unwrap();
    }
}

/// Every refusal of the contract: the key or the setting, and the way out.
#[rstest]
#[case::no_memory(&[("oci-mps/threads", "25")], "oci-mps/threads makes this container an MPS client", "add oci-mps/memory=")]
#[case::unknown_gpu(&[("oci-mps/memory", "1GiB"), ("oci-mps/gpu", "7")], "oci-mps/gpu: there is no GPU 7", "this host has GPU 0")]
#[case::ambiguous_gpu(&[("oci-mps/memory", "1GiB"), ("oci-mps/gpu", "0,GPU-0")], "oci-mps/gpu names GPU 0", "twice")]
#[case::too_many_gpus(&[("oci-mps/memory", "1GiB"), ("oci-mps/gpu", "auto:3")], "oci-mps/gpu asks for 3 GPUs", "it can have GPU 0 (NVIDIA H200), GPU 1 (NVIDIA H200)")]
#[case::amounts(&[("oci-mps/memory", "1GiB,2GiB")], "oci-mps/memory names 2 amounts, but 1 GPU(s)", "oci-mps/gpu=auto:2")]
#[case::no_context(&[("oci-mps/memory", "512MiB")], "oci-mps/memory gives each of 1 process(es) 512 MiB", "fewer oci-mps/threads")]
#[case::no_context_each(&[("oci-mps/memory", "4GiB"), ("oci-mps/processes", "8")], "8 process(es) 512 MiB", "about 558 MiB")]
#[case::no_profile(&[("oci-mps/profile", "huge")], "no profile \"huge\"", "there is small")]
#[case::slices(&[("oci-mps/slices", "5")], "oci-mps/slices asks for 5 slices", "cut into 4 here")]
#[case::memory(&[("oci-mps/memory", "130GiB"), ("oci-mps/gpu", "1")], "GPU 1 (NVIDIA H200) has 126,875 MiB left to share, oci-mps/memory asks for 133,120 MiB", "see 'oci-mps shares'")]
#[case::everywhere(&[("oci-mps/memory", "143300MiB")], "GPU 0 (NVIDIA H200) has 143,259 MiB", "GPU 1 (NVIDIA H200) has 126,875 MiB")]
#[case::slots(&[("oci-mps/memory", "60GiB"), ("oci-mps/processes", "47"), ("oci-mps/gpu", "1")], "GPU 1 (NVIDIA H200) has 46 MPS client slot(s) left, oci-mps/processes takes 47", "shares")]
fn a_refusal_names_the_key_and_the_way_out(
    #[case] annotations: &[(&str, &str)],
    #[case] names: &str,
    #[case] way_out: &str,
) {
    let case = Case {
        config: "[profiles.small]\nmemory='4GiB'",
        others: vec![share(1, SECOND, 16_384, "25", 2)],
        ..Case::default()
    };
    let refused = case.plan(annotations).unwrap_err();
    assert!(refused.contains(names) && refused.contains(way_out), "{refused}");
}

#[test]
fn threads_are_refused_only_where_overcommitment_is_forbidden() {
    let others = vec![share(1, H200, 1024, "40", 2), share(2, SECOND, 1024, "80", 1)];
    let free = Case { others: others.clone(), ..Case::default() };
    assert_eq!(free.placed(&QUARTER).unwrap(), [(0, 8192)]);
    let strict = Case { others, config: "[policy]\nthreads_overcommit=false", ..Case::default() };
    let refused = strict.plan(&QUARTER).unwrap_err();
    assert!(
        refused.contains(
            "GPU 0 (NVIDIA H200) has 20% of its threads left to share, oci-mps/threads asks for 25%"
        )
    );
}

#[test]
fn defaults_profiles_and_the_containers_own_words_come_in_that_order() {
    let case = Case {
        config: "[defaults]\nmemory='2GiB'\nthreads=10\n[profiles.small]\nmemory='4GiB'\ngpu=1",
        ..Case::default()
    };
    assert_eq!(case.placed(&[("oci-mps/threads", "50")]).unwrap(), [(0, 2048)]);
    assert_eq!(case.placed(&[("oci-mps/profile", "small")]).unwrap(), [(1, 4096)]);
    let own = [("oci-mps/profile", "small"), ("oci-mps/memory", "6GiB")];
    assert_eq!(case.placed(&own).unwrap(), [(1, 6144)]);
    assert_eq!(case.plan(&own).unwrap().share.threads, "10".parse().unwrap());
    let refused = Case { config: "[defaults]\nmemory='512MiB'", ..Case::default() };
    let refused = refused.plan(&[("oci-mps/threads", "100")]).unwrap_err();
    assert!(refused.starts_with("[defaults] memory gives each"), "{refused}");
}

#[test]
fn a_host_may_give_profiles_only() {
    let config =
        "[policy]\nonly_profiles=true\n[profiles.small]\nmemory='4GiB'\n[profiles.large]\nmemory='40GiB'";
    let case = Case { config, ..Case::default() };
    case.plan(&[("oci-mps/profile", "small")]).unwrap();
    let refused = case.plan(&QUARTER).unwrap_err();
    assert!(refused.contains("oci-mps/memory: this host gives shares by profile only"), "{refused}");
    assert!(refused.contains("there are large and small"), "{refused}");
}

#[test]
fn mig_is_refused_by_name_and_passed_over_by_auto() {
    let mut case = Case::default();
    case.inventory.gpus[0].mig = true;
    assert_eq!(case.placed(&QUARTER).unwrap(), [(1, 8192)]);
    let refused = case.plan(&[&QUARTER[..], &[("oci-mps/gpu", "0")]].concat()).unwrap_err();
    assert!(refused.starts_with("GPU 0 (NVIDIA H200) is in MIG mode"), "{refused}");
    case.inventory.gpus.truncate(1);
    assert!(case.plan(&QUARTER).unwrap_err().contains("MIG mode"));
    case.spec["process"]["env"] = json!(["NVIDIA_VISIBLE_DEVICES=MIG-1"]);
    assert!(
        case.plan(&QUARTER).unwrap_err().contains("NVIDIA_VISIBLE_DEVICES=MIG-1: \"MIG-1\" is a MIG device")
    );
}

/// The words of the systems that users come from, on the card of their own example.
#[rstest]
#[case(&[("oci-mps/slices", "1")], 5760, "25")]
#[case(&[("oci-mps/slices", "2")], 11_520, "50")]
#[case(&[("aliyun.com/gpu-mem", "7")], 7168, "100")]
#[case(&[("nvidia.com/gpu", "1"), ("nvidia.com/gpumem-percentage", "50"), ("nvidia.com/gpucores", "30")], 11_520, "30")]
fn on_a_p40(#[case] annotations: &[(&str, &str)], #[case] mib: u64, #[case] threads: &str) {
    let case = Case { inventory: inventory(&[(P40, "Tesla P40", 23_040, "6.1", 30)]), ..Case::default() };
    let share = case.plan(annotations).unwrap().share;
    assert_eq!((share.gpus[0].memory.mib(), share.threads), (mib, threads.parse().unwrap()));
}

#[test]
fn a_spec_seen_a_second_time_stays_as_it_is() {
    for spec_before in [podman(), nerdctl()] {
        let case = Case { spec: spec_before, ..Case::default() };
        let first = case.plan(&QUARTER).unwrap();
        let mut once = spec(&case.spec);
        once.apply(&first.edits).unwrap();
        // another container came meanwhile, and would have been the better company
        let facts = Facts {
            config: &HostConfig::default(),
            inventory: &case.inventory,
            others: &[&share(9, SECOND, 8192, "25", 1)],
            held: Some(&first.share),
            token: &token(0),
            site: &site(),
        };
        let request = Request::read(&QUARTER, Aliases::default()).unwrap().unwrap();
        let second = plan(&once, &request, facts).unwrap();
        assert_eq!(second.share, first.share);
        let mut twice = once.clone();
        twice.apply(&second.edits).unwrap();
        assert_eq!(twice.to_bytes(), once.to_bytes());
    }
}

proptest! {
    /// Whatever comes in whatever order, no GPU is promised beyond what it has.
    #[test]
    fn promises_never_exceed_the_card(
        asks in prop::collection::vec((prop_oneof!["[1-9][0-9]{0,2}GiB", "[1-9][0-9]?%"], 1u32..60, 1u32..3), 1..40),
        spread in any::<bool>(),
    ) {
        let config = if spread { "[policy]\nplacement='spread'" } else { "" };
        let mut case = Case { config, ..Case::default() };
        for (n, (memory, processes, gpus)) in (1u32..).zip(&asks) {
            let (processes, gpus) = (processes.to_string(), format!("auto:{gpus}"));
            let annotations = [
                ("oci-mps/memory", memory.as_str()),
                ("oci-mps/processes", &processes),
                ("oci-mps/threads", "10"),
                ("oci-mps/gpu", &gpus),
            ];
            if let Ok(plan) = case.plan(&annotations) {
                case.others.push(Share { token: token(n), ..plan.share });
            }
        }
        for gpu in &case.inventory.gpus {
            let promised = Promised::of(&case.others, &gpu.uuid);
            prop_assert!(promised.memory <= gpu.memory.minus(MemoryQuantity::from_mib(512)));
            prop_assert!(promised.clients <= 48);
        }
    }

    #[test]
    fn slices_of_a_gpu_never_add_up_to_more_than_it(mib in 1u64..1 << 40, slices in 1u32..200) {
        let parts = NonZeroU32::new(slices).unwrap();
        let memory = MemoryQuantity::from_mib(mib);
        prop_assert!(memory.split(parts).times(slices) <= memory);
        let threads = Percentage::of_parts(1, parts).unwrap();
        prop_assert!(threads.thousandths() * slices <= Percentage::WHOLE.thousandths());
    }
}

#[test]
fn slices_of_a_card_all_fit_and_amounts_leave_the_reserve() {
    let p40 = || Case { inventory: inventory(&[(P40, "Tesla P40", 23_040, "6.1", 30)]), ..Case::default() };
    let mut sliced = p40();
    for n in 1..=4 {
        let share = sliced.plan(&[("oci-mps/slices", "1")]).unwrap().share;
        assert_eq!((share.gpus[0].memory.mib(), share.threads), (5760, "25".parse().unwrap()));
        sliced.others.push(Share { token: token(n), ..share });
    }
    let refused = sliced.plan(&[("oci-mps/slices", "1")]).unwrap_err();
    assert!(refused.contains("has 0 MiB left to share, oci-mps/slices asks for 5,760 MiB"), "{refused}");
    assert!(refused.contains("nothing of it fits before somebody ends"), "{refused}");
    // beside slices, an amount gets what the reserve leaves
    let mut mixed = p40();
    mixed.others = sliced.others[..3].to_vec();
    let refused = mixed.plan(&[("oci-mps/memory", "5760MiB"), ("oci-mps/threads", "25")]).unwrap_err();
    assert!(refused.contains("has 5,248 MiB left"), "{refused}");
    assert!(refused.contains("; 5,248 MiB would fit; see 'oci-mps shares'"), "{refused}");
    assert_eq!(
        mixed.placed(&[("oci-mps/memory", "5248MiB"), ("oci-mps/threads", "25")]).unwrap(),
        [(0, 5248)]
    );
}

#[test]
fn gpus_that_are_set_apart_are_neither_chosen_nor_given() {
    let mut case = Case { config: "[gpus]\nmanaged=['1']", ..Case::default() };
    assert_eq!(case.placed(&QUARTER).unwrap(), [(1, 8192)]);
    let refused = case.plan(&[&QUARTER[..], &[("oci-mps/gpu", "0")]].concat()).unwrap_err();
    assert_eq!(
        refused,
        "oci-mps/gpu chooses GPU 0 (NVIDIA H200), which is set apart on this host ([gpus] managed); there is GPU 1 \
         (NVIDIA H200)"
    );
    let refused = case.plan(&[&QUARTER[..], &[("oci-mps/gpu", "auto:2")]].concat()).unwrap_err();
    assert!(refused.contains("asks for 2 GPUs, it can have GPU 1 (NVIDIA H200)"), "{refused}");
    case.spec["process"]["env"] = json!(["NVIDIA_VISIBLE_DEVICES=0"]);
    let refused = case.plan(&QUARTER).unwrap_err();
    assert!(refused.contains("but GPU 0 (NVIDIA H200) is set apart on this host"), "{refused}");
}

#[test]
fn each_gpu_is_cut_and_shared_by_its_own_policy() {
    let config = "[policy.gpu.1]\nslices = 2\nthreads_overcommit = false\nreserve = '1GiB'";
    let case = Case { config, others: vec![share(1, SECOND, 1024, "60", 1)], ..Case::default() };
    let on = |gpu: &'static str, slices: &'static str| {
        case.plan(&[("oci-mps/gpu", gpu), ("oci-mps/slices", slices)]).map(|plan| plan.share)
    };
    let first = on("0", "1").unwrap();
    assert_eq!((first.gpus[0].memory.mib(), first.threads), (35_942, "25".parse().unwrap()));
    let refused = on("1", "1").unwrap_err();
    assert!(refused.contains("GPU 1 (NVIDIA H200) has 40% of its threads left to share"), "{refused}");
    assert!(on("0", "3").is_ok());
    let refused = on("1", "3").unwrap_err();
    assert!(refused.contains("asks for 3 slices, but GPU 1 (NVIDIA H200) is cut into 2 here"), "{refused}");
    // of both, the ceiling that neither exceeds
    let free = Case { config: "[policy.gpu.1]\nslices = 2", ..Case::default() };
    let both = free.plan(&[("oci-mps/gpu", "0,1"), ("oci-mps/slices", "1")]).unwrap().share;
    let memory: Vec<u64> = both.gpus.iter().map(|part| part.memory.mib()).collect();
    assert_eq!((memory, both.threads), (vec![35_942, 71_885], "25".parse().unwrap()));
}

/// What is left, who has it, and what would fit.
#[rstest]
#[case::one_gpu("", &[("oci-mps/memory", "130GiB"), ("oci-mps/gpu", "0")],
    "GPU 0 (NVIDIA H200) has 90,011 MiB left to share, oci-mps/memory asks for 133,120 MiB (T3 has 30,000 MiB, T2 has \
     20,000 MiB, T4 has 2,048 MiB, 2 more the rest); there is room on GPU 1 (NVIDIA H200); see 'oci-mps shares'")]
#[case::amount("", &[("oci-mps/memory", "143000MiB"), ("oci-mps/gpu", "auto:2")],
    "GPU 0 (NVIDIA H200) has 90,011 MiB left to share, oci-mps/memory asks for 143,000 MiB (T3 has 30,000 MiB, T2 has \
     20,000 MiB, T4 has 2,048 MiB, 2 more the rest); 90,011 MiB would fit; see 'oci-mps shares'")]
#[case::slices("", &[("oci-mps/slices", "4"), ("oci-mps/gpu", "0")], "", )]
#[case::threads("[policy.gpu.0]\nthreads_overcommit = false", &[("oci-mps/memory", "8GiB"), ("oci-mps/gpu", "0"), ("oci-mps/threads", "90")], "")]
#[case::processes("", &[("oci-mps/memory", "80GiB"), ("oci-mps/processes", "45"), ("oci-mps/gpu", "auto:2")],
    "GPU 0 (NVIDIA H200) has 43 MPS client slot(s) left, oci-mps/processes takes 45 (T1 has 1 slot(s), T2 has 1 slot(s), \
     T3 has 1 slot(s), 2 more the rest); 43 process(es) would fit; see 'oci-mps shares'")]
fn a_refusal_says_who_has_it_and_what_would_fit(
    #[case] config: &str,
    #[case] annotations: &[(&str, &str)],
    #[case] says: &str,
) {
    let others = vec![
        share(1, H200, 1024, "10", 1),
        share(2, H200, 20_000, "20", 1),
        share(3, H200, 30_000, "30", 1),
        share(4, H200, 2048, "10", 1),
        share(5, H200, 176, "10", 1),
    ];
    let case = Case { config, others, ..Case::default() };
    let mut refused = case.plan(annotations).unwrap_err();
    for n in 1..=5 {
        refused = refused.replace(token(n).as_str(), &format!("T{n}"));
    }
    if says.is_empty() {
        assert!(
            refused.contains("; there is room on GPU 1 (NVIDIA H200); see 'oci-mps shares'"),
            "{refused}"
        );
    } else {
        assert_eq!(refused, says);
    }
}

proptest! {
    /// What a refusal offers is given to whoever asks for that instead.
    #[test]
    fn what_is_said_to_fit_fits(
        others in prop::collection::vec((1u32..60_000, 1u32..50, any::<bool>()), 0..9),
        asked in (1u32..160_000, 1u32..100, 1u32..40, 0u32..3, 1u32..5, any::<bool>()),
        strict in any::<bool>(),
    ) {
        let (mib, threads, processes, gpu, slices, in_slices) = asked;
        let promised = |(n, (mib, threads, second)): (u32, &(u32, u32, bool))| {
            share(n, if *second { SECOND } else { H200 }, (*mib).into(), &threads.to_string(), 3)
        };
        let case = Case {
            config: if strict { "[policy]\nthreads_overcommit=false" } else { "" },
            others: (1u32..).zip(&others).map(promised).collect(),
            ..Case::default()
        };
        let gpu = ["0", "auto", "auto:2"][gpu as usize];
        let ask = |mib: u64, threads: &str, processes: u32, slices: u32, gpu: &str| {
            let mut words = vec![("oci-mps/gpu", gpu.to_owned()), ("oci-mps/processes", processes.to_string())];
            if in_slices {
                words.push(("oci-mps/slices", slices.to_string()));
            } else {
                words.extend([("oci-mps/memory", format!("{mib}MiB")), ("oci-mps/threads", threads.to_owned())]);
            }
            let words: Vec<(&str, &str)> = words.iter().map(|(key, value)| (*key, value.as_str())).collect();
            let request = Request::read(&words, Aliases::default()).unwrap().unwrap();
            let config = HostConfig::parse(case.config).unwrap();
            let others: Vec<&Share> = case.others.iter().collect();
            let (token, site) = (token(0), site());
            plan(&spec(&case.spec), &request, Facts {
                config: &config, inventory: &case.inventory, others: &others, held: None, token: &token, site: &site,
            })
        };
        let (mib, threads) = (u64::from(mib), threads.to_string());
        if let Err(Refusal::NoRoom { fit: Some(fit), .. }) = ask(mib, &threads, processes, slices, gpu) {
            let again = match &fit {
                Fit::Elsewhere(_) => ask(mib, &threads, processes, slices, "auto"),
                Fit::Memory(memory) => ask(memory.mib(), &threads, processes, slices, gpu),
                Fit::Slices(count) => ask(mib, &threads, processes, count.get(), gpu),
                Fit::Threads(threads) => ask(mib, &threads.to_string(), processes, slices, gpu),
                Fit::Processes(count) => ask(mib, &threads, count.get(), slices, gpu),
                Fit::Nothing => return Ok(()),
            };
            prop_assert!(again.is_ok(), "{fit:?}: {:?}", again.map(|_| ()).map_err(|refusal| refusal.to_string()));
        }
    }
}
