use proptest::prelude::*;
use rstest::rstest;

use super::*;

/// A request as the fields it sets, in the contract's order, `field=debug`.
fn read(annotations: &[(&str, &str)]) -> Result<Option<Request>, String> {
    Request::read(annotations, Aliases::default()).map_err(|error| error.to_string())
}

/// What is asked for, said as annotations on a container of its own would say it.
fn plain(annotations: &[(&str, &str)]) -> Size {
    read(annotations).unwrap().expect("it asks").size
}

#[test]
fn who_does_not_ask_is_not_heard() {
    assert_eq!(read(&[]), Ok(None));
    assert_eq!(read(&[("org.example/x", "1"), ("oci-mpsx/memory", "1"), ("x/oci-mps", "1")]), Ok(None));
    assert_eq!(read(&[("nvidia.com/gpu.product", "H200"), ("cdi.k8s.io/x", "nvidia.com/gpu=0")]), Ok(None));
}

#[test]
fn every_key_of_the_contract_is_read() {
    let keys = [
        ("oci-mps/memory", "8GiB"),
        ("oci-mps/threads", "25"),
        ("oci-mps/gpu", "auto"),
        ("oci-mps/profile", "small"),
        ("oci-mps/processes", "2"),
        ("oci-mps/priority", "below-normal"),
        ("oci-mps/ipc", "private"),
    ];
    let request = read(&keys).unwrap().unwrap();
    assert_eq!(request.profile.as_deref(), Some("small"));
    for field in Field::ALL.into_iter().filter(|field| *field != Field::Slices) {
        assert!(request.size.has(field), "{field}");
        assert_eq!(request.key_of(field).unwrap(), format!("oci-mps/{field}"));
    }
    assert!(read(&[("oci-mps/slices", "1")]).unwrap().unwrap().size.has(Field::Slices));
}

#[rstest]
#[case("nvidia.com/gpu", "2", "oci-mps/gpu", "auto:2")]
#[case("nvidia.com/gpumem", "3000", "oci-mps/memory", "3000MiB")]
#[case("nvidia.com/gpumem-percentage", "50", "oci-mps/memory", "50%")]
#[case("nvidia.com/gpucores", "30", "oci-mps/threads", "30")]
#[case("aliyun.com/gpu-mem", "7", "oci-mps/memory", "7GiB")]
fn other_systems_words_mean_the_same(
    #[case] alias: &str,
    #[case] value: &str,
    #[case] key: &str,
    #[case] means: &str,
) {
    assert_eq!(plain(&[(alias, value)]), plain(&[(key, means)]));
    let off = Aliases { hami: false, ack: false };
    assert_eq!(Request::read(&[(alias, value)], off), Ok(None), "configured away");
}

#[rstest]
#[case(&[("oci-mps/memroy", "8GiB")], "unknown annotation oci-mps/memroy; the nearest one is oci-mps/memory")]
#[case(&[("oci-mps/gpus", "0")], "the nearest one is oci-mps/gpu")]
#[case(&[("oci-mps/", "0")], "unknown annotation oci-mps/;")]
#[case(&[("oci-mps/memory", "banana")], "oci-mps/memory: \"banana\" is not an amount of memory")]
#[case(&[("oci-mps/threads", "0")], "oci-mps/threads: \"0\" is not a percentage")]
#[case(&[("nvidia.com/gpumem", "8GiB")], "nvidia.com/gpumem: \"8GiB\" is not a number of MiB")]
#[case(&[("nvidia.com/gpucores", "0")], "nvidia.com/gpucores: \"0%\" is not a percentage")]
#[case(&[("aliyun.com/gpu-mem", "0")], "aliyun.com/gpu-mem: \"0GiB\" asks for nothing")]
#[case(
    &[("nvidia.com/gpumem", "10"), ("oci-mps/memory", "1GiB")],
    "nvidia.com/gpumem and oci-mps/memory both say the memory; keep one"
)]
#[case(
    &[("nvidia.com/gpumem", "10"), ("aliyun.com/gpu-mem", "1")],
    "nvidia.com/gpumem and aliyun.com/gpu-mem both say the memory"
)]
#[case(
    &[(TOKEN_ANNOTATION, "0123456789abcdef0123456789abcdef")],
    "oci-mps/.token is written by oci-mps and asks for nothing"
)]
#[case(&[("oci-mps/share", "25%")], "unknown annotation oci-mps/share; the nearest one is oci-mps/")]
#[case(&[("oci-mps.memory", "8GiB")], "unknown annotation oci-mps.memory; the nearest one is oci-mps/memory")]
#[case(&[("OCI-MPS/threads", "8")], "unknown annotation OCI-MPS/threads; the nearest one is oci-mps/threads")]
#[case(&[("oci-mps", "8")], "unknown annotation oci-mps;")]
#[case(
    &[("oci-mps/slices", "1"), ("oci-mps/threads", "1")],
    "oci-mps/slices already says memory and threads; leave out oci-mps/threads"
)]
#[case(&[("oci-mps/memory.train", "8GiB")], "but this container is in none; write oci-mps/memory")]
fn what_is_not_clear_is_refused_by_name(#[case] annotations: &[(&str, &str)], #[case] says: &str) {
    let error = read(annotations).unwrap_err();
    assert!(error.contains(says), "{error}");
}

/// What containerd's CRI plugin and CRI-O write beside a pod's own annotations.
const CONTAINERD: [&str; 2] = ["io.kubernetes.cri.container-type", "io.kubernetes.cri.container-name"];
const CRIO: [&str; 2] = ["io.kubernetes.cri-o.ContainerType", "io.kubernetes.container.name"];

fn in_pod<'a>(cri: [&'a str; 2], container: &'a str, keys: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&[(cri[0], "container"), (cri[1], container)], keys].concat()
}

#[rstest]
fn a_pods_containers_are_told_apart(#[values(CONTAINERD, CRIO)] cri: [&str; 2]) {
    let keys = [("oci-mps/memory.train", "8GiB"), ("oci-mps/threads", "25"), ("oci-mps/threads.train", "50")];
    let train = read(&in_pod(cri, "train", &keys)).unwrap().unwrap();
    assert!(train.in_pod);
    assert_eq!(train.size, plain(&[("oci-mps/memory", "8GiB"), ("oci-mps/threads", "50")]));
    assert_eq!(train.key_of(Field::Threads), Some("oci-mps/threads.train"));
    assert_eq!(
        read(&in_pod(cri, "sidecar", &keys)),
        Ok(None),
        "unqualified keys are not for the others then"
    );
    let sandbox = [&[(cri[0], "sandbox")], &keys[..]].concat();
    assert_eq!(read(&sandbox), Ok(None), "a sandbox is never touched");
}

#[rstest]
fn unqualified_keys_alone_are_for_every_container(#[values(CONTAINERD, CRIO)] cri: [&str; 2]) {
    for container in ["train", "sidecar"] {
        let request = read(&in_pod(cri, container, &[("oci-mps/memory", "8GiB")])).unwrap().unwrap();
        assert_eq!(request.size, plain(&[("oci-mps/memory", "8GiB")]));
    }
}

#[test]
fn a_misspelt_key_for_one_container_is_refused_for_all() {
    let error = read(&in_pod(CONTAINERD, "sidecar", &[("oci-mps/memroy.train", "8GiB")])).unwrap_err();
    assert!(error.contains("the nearest one is oci-mps/memory.train"), "{error}");
}

#[test]
fn a_sandbox_is_not_even_read() {
    assert_eq!(read(&[(CONTAINERD[0], "sandbox"), ("oci-mps/memory", "banana")]), Ok(None));
}

proptest! {
    #[test]
    fn any_annotations_are_read_or_refused(
        keys in prop::collection::vec(
            (prop_oneof!["oci-mps/[a-z.]{0,12}", "nvidia.com/gpu[a-z-]{0,10}", ".{0,20}"], ".{0,12}"), 0..8),
    ) {
        let annotations: Vec<(&str, &str)> = keys.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let _ = read(&annotations);
    }

    #[test]
    fn a_key_that_begins_like_ours_is_never_ignored(name in "[a-zA-Z0-9_-]{0,16}", value in "[a-zA-Z0-9%,.]{0,10}") {
        let key = format!("oci-mps/{name}");
        prop_assume!(key != TOKEN_ANNOTATION);
        prop_assert_ne!(read(&[(&key, &value)]), Ok(None));
    }
}
