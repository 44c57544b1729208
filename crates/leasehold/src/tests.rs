//! Tests of the library as a whole: its pages and its layers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The pages whose examples run are symbolic links. Where they were copied as files, each contains only a path.
#[test]
fn the_pages_with_examples_are_pages() {
    for page in [
        include_str!("../README.md"),
        include_str!("../docs/choosing.md"),
        include_str!("../docs/fencing.md"),
        include_str!("../docs/getting-started.md"),
        include_str!("../docs/how-to.md"),
    ] {
        assert!(page.starts_with("# "), "not a page, but {page:?}");
    }
}

/// The modules of the crate, from the lowest layer to the highest. Modules between the same bars may import each other.
const LAYERS: [&str; 8] = [
    "broken callbacks clock error fence id manual_clock name observer primitive retry url virtual_time",
    "machine",
    "metrics process stats",
    "backend | client_core",
    "model simulation",
    "engine",
    "acquire blocking client guard json lock permit limits pool semaphore tower",
    "compat",
];

/// Returns the layer of a module, and its place between the bars.
fn layer(module: &str) -> (usize, usize) {
    let layers = LAYERS.iter().enumerate();
    let all = layers.flat_map(|(layer, modules)| {
        modules.split('|').enumerate().map(move |(group, names)| ((layer, group), names))
    });
    let mut found = all.filter(|(_, names)| names.split_whitespace().any(|name| name == module));
    let (place, _) = found.next().unwrap_or_else(|| panic!("{module} is in no layer"));
    place
}

/// Returns the shipped code of every file of the library: without comments and tests, each with its module.
fn sources() -> Vec<(String, String)> {
    fn walk(folder: &Path, files: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, files) } else { files.push(path) }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    walk(&root, &mut files);
    let tests = ["tests", "model", "simulation", "simulated", "differential"];
    let sources = files.into_iter().filter_map(|path| {
        let name = path.strip_prefix(&root).unwrap().to_str()?.strip_suffix(".rs")?.to_owned();
        let mut parts = name.split('/');
        let is_test = parts.any(|part| tests.contains(&part)) || name == "lib";
        let text = fs::read_to_string(&path).unwrap();
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let code: Vec<_> =
            text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        (!is_test).then(|| (name, code.join("\n")))
    });
    sources.collect()
}

/// Returns the items at the root of the crate, each with the module that defines it.
fn items_of_the_root() -> BTreeMap<String, String> {
    let root = include_str!("lib.rs");
    let uses = root.split("pub use ").skip(1).map(|rest| rest.split(';').next().unwrap());
    let items = uses.flat_map(|path| {
        let module = path.split("::").next().unwrap().to_owned();
        let names = path.rsplit("::").next().unwrap().replace(['{', '}', '\n'], " ");
        let names: Vec<_> = names.split(',').map(|name| name.trim().to_owned()).collect();
        names.into_iter().filter(|name| !name.is_empty()).map(move |name| (name, module.clone()))
    });
    items.collect()
}

/// Returns the modules and items of the crate's root that this code names.
fn named(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    for rest in code.split("crate::").skip(1) {
        // `crate::{a::B, C}` names several, and `crate::a::{B, C}` one.
        let path = match rest.strip_prefix('{') {
            Some(list) => list.split("};").next().unwrap(),
            None => rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap(),
        };
        let depth = |at: usize| path[..at].matches('{').count() - path[..at].matches('}').count();
        let starts = path.match_indices(',').map(|(at, _)| at + 1);
        for start in std::iter::once(0).chain(starts).filter(|start| depth(*start) == 0) {
            let name = path[start..].trim_start();
            let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            names.push(name[..end.unwrap_or(name.len())].to_owned());
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

#[test]
fn imports_point_down() {
    let items = items_of_the_root();
    assert_eq!(items["LockGuard"], "lock");
    assert_eq!(named("use crate::{a::{B, C}, D};\nlet e = crate::f::G;"), ["a", "D", "f"]);
    let mut upward = Vec::new();
    for (file, code) in sources() {
        let importer = layer(file.split('/').next().unwrap());
        for name in named(&code) {
            let module = items.get(&name).unwrap_or(&name);
            let target = layer(module);
            if target.0 > importer.0 || target.0 == importer.0 && target.1 != importer.1 {
                upward.push(format!("{file}.rs imports crate::{name}, which is above it"));
            }
        }
    }
    assert!(upward.is_empty(), "{}", upward.join("\n"));
}
