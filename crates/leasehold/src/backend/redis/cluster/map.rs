//! The map from slots to primaries, as one node returns it.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Address, host_or};
use crate::Error;
use crate::backend::redis::RedisSettings;
use crate::backend::redis::command::RedisCommand;
use crate::backend::redis::connect::{OpenSocket, field};
use crate::backend::redis::connection::Connection;
use crate::backend::redis::errors::{RedisError, translate, within};
use crate::backend::redis::slots::SLOTS;
use crate::backend::redis::value::Value;
use crate::url::ServerSettings;

/// The primaries with their ranges of slots (first and last), and the replicas.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Map {
    pub(super) ranges: Vec<(u16, u16, Address)>,
    pub(super) replicas: Vec<Address>,
    /// Whether the cluster state of the node that returned the map is ok.
    pub(super) is_sure: bool,
    /// The newest epoch of the cluster that this node knows.
    pub(super) epoch: u64,
}

impl Map {
    /// The number of slots that a node serves, and the epoch. Of two doubtful maps, the one with the higher rank is
    /// better.
    pub(super) fn rank(&self) -> (usize, u64) {
        let served = self.ranges.iter().map(|(first, last, _)| usize::from(last - first) + 1);
        (served.sum(), self.epoch)
    }
}

/// A node to ask for the map: over its connection, or over one made for this query.
pub(super) struct MapSource {
    pub(super) info: ServerSettings,
    pub(super) connection: Option<Arc<Connection>>,
}

/// Returns the map as one node knows it.
pub(super) async fn ask_one(settings: Arc<RedisSettings>, source: MapSource) -> Result<Map, Error> {
    let queries = ["SLOTS", "INFO"].map(|word| RedisCommand::new("CLUSTER").arg(word));
    let MapSource { info, connection } = source;
    let what = format!("request to {info}");
    let asking = async {
        if let Some(connection) = connection {
            let answers: Result<Vec<_>, _> =
                connection.request(&queries).await?.into_iter().collect();
            return answers.map_err(|error| connection.translate(&error));
        }
        let failed = |error: RedisError| not_a_cluster(&what, &info, &error);
        let (_, answers) = OpenSocket::open(&settings, &info, &queries).await.map_err(failed)?;
        let answers: Result<Vec<_>, _> = answers.into_iter().map(Value::checked).collect();
        answers.map_err(|error| failed(error.into()))
    };
    let mut answers = within(settings.connect_timeout, &what, asking).await?;
    let state: String = answers.pop().unwrap_or_default().read().map_err(Error::internal)?;
    let map = read_map(answers.pop().unwrap_or_default(), &info.host_and_port().0);
    let map =
        map.ok_or_else(|| Error::internal("the answer to CLUSTER SLOTS could not be read"))?;
    let epoch = field(&state, "cluster_current_epoch:");
    let epoch = epoch.and_then(|epoch| epoch.parse().ok()).unwrap_or_default();
    Ok(Map { is_sure: state.contains("cluster_state:ok"), epoch, ..map })
}

fn not_a_cluster(what: &str, info: &ServerSettings, error: &RedisError) -> Error {
    match error {
        RedisError::Server(error) if error.to_string().contains("cluster support disabled") => {
            let problem = format!("the server is not a cluster node: use {info}");
            Error::Unusable { problem: format!("{what}: {problem}") }
        }
        error => translate(what, error),
    }
}

/// Reads the answer to `CLUSTER SLOTS` of the node at `host`.
fn read_map(answer: Value, host: &str) -> Option<Map> {
    let Value::Array(ranges) = answer else { return None };
    let (mut map, mut replicas) = (Map::default(), HashSet::new());
    for range in ranges {
        let Value::Array(fields) = range else { return None };
        let mut fields = fields.into_iter();
        let mut slot = || match fields.next()? {
            Value::Int(slot) => u16::try_from(slot).ok().filter(|slot| *slot < SLOTS),
            _ => None,
        };
        let (first, last) = (slot()?, slot()?);
        if first > last {
            return None;
        }
        let mut nodes = fields.filter_map(|node| read_node(node, host));
        map.ranges.push((first, last, nodes.next()?));
        replicas.extend(nodes);
    }
    map.replicas = replicas.into_iter().collect();
    Some(map)
}

fn read_node(node: Value, host: &str) -> Option<Address> {
    let Value::Array(fields) = node else { return None };
    let [endpoint, Value::Int(port), ..] = &fields[..] else { return None };
    let endpoint = match endpoint {
        Value::Nil => "",
        Value::Text(text) => str::from_utf8(text).ok()?,
        _ => return None,
    };
    Some((host_or(endpoint, host), u16::try_from(*port).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::Text(text.into())
    }

    #[test]
    fn a_map_is_read_whatever_it_leaves_out() {
        let node = |host: Value, port| Value::Array(vec![host, Value::Int(port), text("id")]);
        let range = |first, last, nodes: Vec<Value>| {
            let slots = [first, last].map(Value::Int);
            Value::Array(slots.into_iter().chain(nodes).collect())
        };
        let answer = Value::Array(vec![
            range(0, 99, vec![node(text("10.0.0.1"), 1), node(text("10.0.0.2"), 2)]),
            range(100, 16383, vec![node(Value::Nil, 3), node(text(""), 4)]),
        ]);
        let map = read_map(answer, "asked").unwrap();
        assert_eq!(map.ranges[0], (0, 99, ("10.0.0.1".to_owned(), 1)));
        assert_eq!(map.ranges[1], (100, 16383, ("asked".to_owned(), 3)));
        let mut replicas = map.replicas;
        replicas.sort();
        assert_eq!(replicas, [("10.0.0.2".to_owned(), 2), ("asked".to_owned(), 4)]);
        let backwards = Value::Array(vec![range(5, 4, vec![node(text("a"), 1)])]);
        assert_eq!(read_map(backwards, "asked"), None);
    }

    #[test]
    fn of_two_doubtful_maps_the_more_complete_is_better_and_then_the_newer() {
        let map = |last, epoch| Map {
            ranges: vec![(0, 99, ("a".to_owned(), 1)), (100, last, ("b".to_owned(), 1))],
            epoch,
            ..Map::default()
        };
        assert_eq!(map(16383, 7).rank(), (16384, 7));
        assert!(map(16383, 1).rank() > map(16382, 9).rank());
        assert!(map(16383, 2).rank() > map(16383, 1).rank());
        assert!(Map::default().rank() < map(100, 0).rank());
    }
}
