use oci_spec::runtime::{HookBuilder, MountBuilder};
use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn document(text: &str) -> Document {
    Document::parse(text.as_bytes()).unwrap()
}

fn applied(text: &str, edits: &[Edit]) -> String {
    let mut edited = document(text);
    edited.apply(edits).unwrap();
    let once = edited.to_bytes();
    edited.apply(edits).unwrap();
    assert_eq!(edited.to_bytes(), once, "a second time changes nothing");
    String::from_utf8(once).unwrap()
}

fn set(name: &str, value: &str) -> Edit {
    Edit::SetEnv { name: name.to_owned(), value: value.to_owned() }
}

fn bind(source: &str, destination: &str) -> Edit {
    let mount = MountBuilder::default().destination(destination).typ("bind").source(source);
    Edit::Mount(Box::new(mount.options(vec!["bind".to_owned(), "ro".to_owned()]).build().unwrap()))
}

fn hook(timeout: i64) -> Edit {
    let hook = HookBuilder::default().path("/x").args(vec!["x".to_owned(), "go".to_owned()]).timeout(timeout);
    Edit::AddHook { stage: Stage::CreateRuntime, hook: Box::new(hook.build().unwrap()) }
}

/// What engines and people write that a typed round trip would not bring back.
#[rstest]
#[case::unknown_keys_and_order(r#"{"z":{"unknown":[{"deep":null}]},"ociVersion":"1.0.2","a":null}"#)]
#[case::numbers(
    r#"{"big":36893488147419103232,"negative":-0,"float":1.0,"exact":0.1000000000000000055511151231257827}"#
)]
#[case::exponents_as_go_writes_them(r#"{"small":1e-400,"large":1e+400}"#)]
#[case::namespaces_nobody_knows(r#"{"linux":{"namespaces":[{"type":"time"},{"type":"moon","x":1}]}}"#)]
#[case::duplicate_mounts(r#"{"mounts":[{"destination":"/a"},{"destination":"/a"},{"destination":"/a/"}]}"#)]
#[case::text(r#"{"a":"\u0000\n\"é😀","":{}}"#)]
#[case::runc_spec(
    "{\n\t\"ociVersion\": \"1.0.2\",\n\t\"empty\": [],\n\t\"none\": {},\n\t\"a\": [\n\t\t1\n\t]\n}"
)]
#[case::podman_spec("{\"ociVersion\":\"1.0.2\"}\n")]
#[case::two_blanks("{\n  \"a\": {\n    \"b\": 1\n  }\n}\n")]
#[case::empty("{}")]
fn a_document_comes_back_byte_for_byte(#[case] text: &str) {
    assert_eq!(String::from_utf8(document(text).to_bytes()).unwrap(), text);
}

#[rstest]
#[case("", "not JSON")]
#[case("{\"a\":", "not JSON")]
#[case("{} trailing", "not JSON")]
#[case("[]", "not a JSON object")]
#[case(r#"{"a":{"$serde_json::private::Number":"1"}}"#, "reserved key")]
fn what_is_no_document_is_refused(#[case] text: &str, #[case] says: &str) {
    let error = Document::parse(text.as_bytes()).unwrap_err().to_string();
    assert!(error.contains(says), "{error}");
}

#[rstest]
#[case::appended(r#"{"process":{"env":["A=1"]}}"#, r#"{"process":{"env":["A=1","X=new"]}}"#)]
#[case::in_its_place(r#"{"process":{"env":["X=old","A=1"]}}"#, r#"{"process":{"env":["X=new","A=1"]}}"#)]
#[case::duplicates_go(
    r#"{"process":{"env":["X=1","A=1","X","X=2"]}}"#,
    r#"{"process":{"env":["X=new","A=1"]}}"#
)]
#[case::longer_names_stay(r#"{"process":{"env":["XY=1"]}}"#, r#"{"process":{"env":["XY=1","X=new"]}}"#)]
#[case::no_list_yet(r#"{"process":{"env":null}}"#, r#"{"process":{"env":["X=new"]}}"#)]
fn a_variable_is_set_once(#[case] before: &str, #[case] after: &str) {
    assert_eq!(applied(before, &[set("X", "new")]), after);
}

#[test]
fn a_variable_is_removed_with_its_duplicates() {
    let before = r#"{"process":{"env":["X=1","A=1","X=2","X"]}}"#;
    assert_eq!(
        applied(before, &[Edit::RemoveEnv { name: "X".to_owned() }]),
        r#"{"process":{"env":["A=1"]}}"#
    );
}

#[test]
fn a_namespace_is_left_and_the_others_stay() {
    let before = r#"{"linux":{"namespaces":[{"type":"ipc"},{"type":"pid"},{"type":"ipc","path":"/x"}]}}"#;
    let after = r#"{"linux":{"namespaces":[{"type":"pid"}]}}"#;
    assert_eq!(applied(before, &[Edit::LeaveNamespace { kind: "ipc" }]), after);
}

const BIND: &str = r#"{"destination":"/run/x","type":"bind","source":"/s","options":["bind","ro"]}"#;

#[rstest]
#[case::appended("", "@")]
#[case::in_its_place(r#"{"destination":"/run/x","k":1},{"destination":"/b"}"#, r#"@,{"destination":"/b"}"#)]
#[case::written_otherwise(r#"{"destination":"/run//x/"},{"destination":"/b"}"#, r#"@,{"destination":"/b"}"#)]
#[case::duplicates(
    r#"{"destination":"/run/x"},{"destination":"/b"},{"destination":"/run/x"}"#,
    r#"@,{"destination":"/b"}"#
)]
#[case::hidden_by_a_later_one(
    r#"{"destination":"/run/x"},{"destination":"/run"}"#,
    r#"{"destination":"/run"},@"#
)]
#[case::a_neighbour_does_not_hide(
    r#"{"destination":"/run/x"},{"destination":"/run/xy"}"#,
    r#"@,{"destination":"/run/xy"}"#
)]
fn a_mount_is_there_once_and_visible(#[case] before: &str, #[case] after: &str) {
    let whole = |mounts: &str| format!(r#"{{"mounts":[{}]}}"#, mounts.replace('@', BIND));
    assert_eq!(applied(&whole(before), &[bind("/s", "/run/x")]), whole(after));
}

#[test]
fn a_mount_is_removed_wherever_it_stands() {
    let before = r#"{"mounts":[{"destination":"/a/"},{"destination":"/b"},{"destination":"//a"}]}"#;
    assert_eq!(
        applied(before, &[Edit::RemoveMount { destination: "/a" }]),
        r#"{"mounts":[{"destination":"/b"}]}"#
    );
}

#[test]
fn a_hook_is_added_once_after_the_others() {
    let before = r#"{"hooks":{"createRuntime":[{"path":"/other"}]}}"#;
    let ours = r#"{"path":"/x","args":["x","go"],"timeout":"#;
    let after =
        |timeout: i64| format!(r#"{{"hooks":{{"createRuntime":[{{"path":"/other"}},{ours}{timeout}}}]}}}}"#);
    assert_eq!(applied(before, &[hook(1)]), after(1));
    assert_eq!(applied(&after(1), &[hook(2)]), after(2));
}

#[test]
fn an_annotation_is_set_where_there_were_none() {
    let edit = Edit::Annotate { key: "k".to_owned(), value: "v".to_owned() };
    assert_eq!(applied("{}", &[edit]), r#"{"annotations":{"k":"v"}}"#);
}

#[rstest]
#[case(r#"{"process":[]}"#, "process")]
#[case(r#"{"process":{"env":{}}}"#, "env")]
fn a_field_of_another_shape_is_named(#[case] text: &str, #[case] field: &str) {
    let error = document(text).apply(&[set("X", "1")]).unwrap_err().to_string();
    assert!(error.starts_with(field) && error.contains("config.json is not"), "{error}");
}

#[test]
fn an_annotation_that_is_no_text_is_named() {
    let spec = document(r#"{"annotations":{"oci-mps/threads":25}}"#);
    let error = spec.annotations().unwrap_err().to_string();
    assert_eq!(error, r#"annotations["oci-mps/threads"] in the container's config.json is not a string"#);
}

#[test]
fn the_parts_that_are_read_are_found() {
    let spec = document(
        r#"{"process":{"env":["A=1=2","B"]},"annotations":{"k":"v"},
            "mounts":[{"destination":"/dev/shm","type":"tmpfs","options":["nosuid"]},{"nothing":1}],
            "linux":{"sysctl":{"kernel.shmmax":"1"},"devices":[{"path":"/dev/nvidia0"}],
                     "namespaces":[{"type":"ipc","path":""},{"type":"network","path":"/n"}]}}"#,
    );
    assert_eq!(spec.env().unwrap(), [("A", "1=2"), ("B", "")]);
    assert_eq!(spec.annotation("k"), Some("v"));
    assert_eq!(spec.namespace("ipc"), Some(Namespace { path: None }));
    assert_eq!(spec.namespace("network"), Some(Namespace { path: Some("/n") }));
    assert_eq!(spec.namespace("user"), None);
    assert_eq!(spec.sysctls().collect::<Vec<_>>(), ["kernel.shmmax"]);
    assert_eq!(spec.devices().collect::<Vec<_>>(), ["/dev/nvidia0"]);
    assert_eq!(spec.mounts().count(), 1);
}

fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        any::<i64>().prop_map(|n| n.to_string()),
        "[1-9][0-9]{20,40}",
        "-?(0|[1-9][0-9]{0,5})\\.[0-9]{1,30}",
        "[1-9](\\.[0-9]{1,5})?e-?[1-9][0-9]{0,2}",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        number.prop_map(|digits| serde_json::from_str(&digits).unwrap()),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::vec((any::<String>(), inner), 0..8).prop_map(|all| all.into_iter().collect()),
        ]
    })
}

proptest! {
    #[test]
    fn whatever_else_stands_in_a_document_comes_back(
        before in prop::collection::vec(("[a-z]{1,6}X", any_json()), 0..6),
        after in prop::collection::vec(("[a-z]{1,6}Y", any_json()), 0..6),
        pretty in any::<bool>(),
    ) {
        let mut root: Map<String, Value> = before.into_iter().collect();
        root.insert("process".to_owned(), json!({"env": ["A=1"], "unknown": null}));
        root.extend(after);
        let original = if pretty { serde_json::to_vec_pretty(&root) } else { serde_json::to_vec(&root) }.unwrap();
        let mut spec = Document::parse(&original).unwrap();
        prop_assert_eq!(&spec.to_bytes(), &original);
        spec.apply(&[set("X", "1"), Edit::RemoveEnv { name: "X".to_owned() }]).unwrap();
        prop_assert_eq!(spec.to_bytes(), original);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Document::parse(&bytes);
    }
}
