use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;

use super::*;

fn hash(text: &str) -> SpecHash {
    SpecHash::from_annotation(text)
}

fn rec(text: &str, provider: &str) -> Recorded {
    Recorded {
        hash: hash(text),
        provider: provider.into(),
    }
}

fn id() -> ProviderId {
    ProviderId::new("fake/a/1")
}

fn running() -> InstanceState {
    InstanceState::Running {
        address: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        port: None,
    }
}

fn here(state: InstanceState) -> Sight {
    Sight::Here {
        id: id(),
        state,
        overdue: false,
    }
}

fn failed(class: ErrorClass) -> Sight {
    Sight::Failed(Failure {
        class,
        message: "fake-a: get: no".into(),
        during: During::Look,
    })
}

/// Managed, wants hash `h1` at `a`, which is configured; nothing there yet.
fn mk() -> Observed {
    Observed {
        deleting: false,
        finalizer: false,
        skip_cleanup: false,
        recorded: None,
        provider_id: None,
        wish: Wish::Managed {
            provider: "a".into(),
            configured: true,
            port: 3128,
            hash: Ok(hash("h1")),
        },
        home: Home::Configured("a".into()),
        sight: Sight::NotAsked,
        held: false,
        delete_accepted: false,
        create_delayed: false,
    }
}

/// The same with a recorded, running instance.
fn mk_running() -> Observed {
    Observed {
        finalizer: true,
        recorded: Some(rec("h1", "a")),
        provider_id: Some(id()),
        sight: here(running()),
        ..mk()
    }
}

#[track_caller]
fn acts(o: &Observed, action: Action) {
    assert_eq!(plan(o), Decision::Act(action), "{o:?}");
}

#[track_caller]
fn rests(o: &Observed) -> Rest {
    match plan(o) {
        Decision::Rest(rest) => rest,
        other => panic!("{other:?} for {o:?}"),
    }
}

fn delete(why: Why) -> Action {
    Action::Delete {
        id: id(),
        why,
        blind: false,
    }
}

#[test]
fn a_new_proxy_is_recorded_then_created() {
    acts(&mk(), Action::Record(rec("h1", "a")));
    let recorded = Observed {
        finalizer: true,
        recorded: Some(rec("h1", "a")),
        ..mk()
    };
    acts(&recorded, Action::Create);
    let no_finalizer = Observed {
        finalizer: false,
        ..recorded
    };
    acts(&no_finalizer, Action::Record(rec("h1", "a")));
}

#[test]
fn a_running_one_is_probed_with_its_own_port_if_it_has_one() {
    let rest = rests(&mk_running());
    assert!(matches!(
        rest,
        Rest::Probed {
            port: 3128,
            id: Some(_),
            caveat: None,
            ..
        }
    ));
    let other_port = Observed {
        sight: here(InstanceState::Running {
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: Some(40_000),
        }),
        ..mk_running()
    };
    assert!(matches!(
        rests(&other_port),
        Rest::Probed { port: 40_000, .. }
    ));
}

#[test]
fn a_changed_spec_deletes_waits_until_gone_and_only_then_records() {
    let changed = Observed {
        recorded: Some(rec("h0", "a")),
        ..mk_running()
    };
    acts(&changed, delete(Why::SpecChanged));
    let draining = Observed {
        delete_accepted: true,
        ..changed.clone()
    };
    assert_eq!(rests(&draining), Rest::Draining(Why::SpecChanged));
    let gone = Observed {
        sight: Sight::Absent,
        ..changed.clone()
    };
    acts(&gone, Action::Forget);
    let forgotten = Observed {
        provider_id: None,
        ..gone
    };
    acts(&forgotten, Action::Record(rec("h1", "a")));
    // A 503 on the way is no "gone" (karpenter-provider-gcp#267).
    let unsure = Observed {
        sight: failed(ErrorClass::Transient),
        ..changed
    };
    assert!(matches!(rests(&unsure), Rest::Failed(_)));
}

#[test]
fn a_changed_provider_deletes_at_the_old_one() {
    let moved = Observed {
        recorded: Some(rec("h0", "old")),
        home: Home::Configured("old".into()),
        ..mk_running()
    };
    acts(&moved, delete(Why::SpecChanged));
    let old_is_gone = Observed {
        home: Home::NotConfigured("old".into()),
        sight: Sight::NotAsked,
        ..moved
    };
    assert_eq!(
        rests(&old_is_gone),
        Rest::NotConfigured {
            provider: "old".into(),
            holds_instance: true
        }
    );
}

#[test]
fn stopped_and_overdue_are_made_anew() {
    acts(
        &Observed {
            sight: here(InstanceState::Stopped),
            ..mk_running()
        },
        delete(Why::Stopped),
    );
    let late = Observed {
        sight: Sight::Here {
            id: id(),
            state: InstanceState::Provisioning(Step::Creating("x".into())),
            overdue: true,
        },
        ..mk_running()
    };
    acts(&late, delete(Why::Overdue));
    let lost = Observed {
        provider_id: None,
        sight: Sight::NotAsked,
        create_delayed: true,
        ..mk_running()
    };
    assert_eq!(rests(&lost), Rest::Recreating);
}

#[test]
fn an_instance_without_a_record_is_adopted() {
    let found = Observed {
        recorded: None,
        ..mk_running()
    };
    acts(&found, Action::Record(rec("h1", "a")));
    let absent = Observed {
        sight: Sight::Absent,
        ..found
    };
    acts(&absent, Action::Forget);
}

#[test]
fn without_user_data_nothing_is_created_and_what_runs_goes_on() {
    let without = |o: Observed| Observed {
        wish: Wish::Managed {
            provider: "a".into(),
            configured: true,
            port: 3128,
            hash: Err("secret default/s does not exist".into()),
        },
        ..o
    };
    assert!(matches!(rests(&without(mk())), Rest::NoUserData(_)));
    assert!(matches!(
        rests(&without(mk_running())),
        Rest::Probed {
            caveat: Some(_),
            ..
        }
    ));
}

#[test]
fn deletion_ends_in_every_case_that_the_rules_name() {
    let deleting = Observed {
        deleting: true,
        ..mk_running()
    };
    acts(&deleting, delete(Why::ProxyDeleted));
    // Gone by somebody else's hand: what belonged to it is cleaned up before the release.
    let absent = Observed {
        sight: Sight::Absent,
        ..deleting.clone()
    };
    acts(
        &absent,
        Action::Delete {
            id: id(),
            why: Why::ProxyDeleted,
            blind: true,
        },
    );
    acts(
        &Observed {
            delete_accepted: true,
            ..absent
        },
        Action::Release { abandoned: false },
    );
    // `get` fails permanently: delete all the same.
    acts(
        &Observed {
            sight: failed(ErrorClass::Permanent),
            ..deleting.clone()
        },
        Action::Delete {
            id: id(),
            why: Why::ProxyDeleted,
            blind: true,
        },
    );
    assert!(matches!(
        rests(&Observed {
            sight: failed(ErrorClass::Transient),
            ..deleting.clone()
        }),
        Rest::Failed(_)
    ));
    let unconfigured = Observed {
        home: Home::NotConfigured("a".into()),
        sight: Sight::NotAsked,
        ..deleting.clone()
    };
    assert!(matches!(
        rests(&unconfigured),
        Rest::NotConfigured {
            holds_instance: true,
            ..
        }
    ));
    // The annotation comes before the look-up of the provider, and before any wait.
    acts(
        &Observed {
            skip_cleanup: true,
            held: true,
            ..unconfigured.clone()
        },
        Action::Release { abandoned: true },
    );
    acts(
        &Observed {
            recorded: None,
            provider_id: None,
            ..unconfigured
        },
        Action::Release { abandoned: false },
    );
    // An External one has no provider to ask.
    acts(
        &Observed {
            home: Home::Nowhere,
            recorded: None,
            provider_id: None,
            sight: Sight::NotAsked,
            ..deleting.clone()
        },
        Action::Release { abandoned: false },
    );
    assert_eq!(
        rests(&Observed {
            finalizer: false,
            ..deleting
        }),
        Rest::Gone
    );
}

#[test]
fn an_external_one_is_only_probed() {
    let external = Observed {
        wish: Wish::External {
            host: "proxy.example".into(),
            port: 8080,
        },
        home: Home::Nowhere,
        ..mk()
    };
    assert_eq!(
        rests(&external),
        Rest::Probed {
            host: "proxy.example".into(),
            port: 8080,
            id: None,
            caveat: None
        }
    );
}

fn any_sight() -> impl Strategy<Value = Sight> {
    let class = prop_oneof![
        Just(ErrorClass::QuotaExceeded),
        Just(ErrorClass::Transient),
        Just(ErrorClass::Permanent),
    ];
    let state = prop_oneof![
        Just(InstanceState::Stopped),
        Just(running()),
        Just(InstanceState::Provisioning(Step::Creating("x".into()))),
    ];
    prop_oneof![
        Just(Sight::NotAsked),
        Just(Sight::Absent),
        (state, any::<bool>()).prop_map(|(state, overdue)| Sight::Here {
            id: id(),
            state,
            overdue
        }),
        class.prop_map(failed),
    ]
}

fn any_observed() -> impl Strategy<Value = Observed> {
    let recorded = prop::option::of(prop_oneof![
        Just(rec("h1", "a")),
        Just(rec("h0", "a")),
        Just(rec("h0", "b"))
    ]);
    let wish = prop_oneof![
        1 => Just(Wish::Invalid("no".into())),
        1 => Just(Wish::External { host: "h".into(), port: 1 }),
        6 => (any::<bool>(), any::<bool>()).prop_map(|(configured, ok)| Wish::Managed {
            provider: "a".into(),
            configured,
            port: 3128,
            hash: if ok { Ok(hash("h1")) } else { Err("none".into()) },
        }),
    ];
    let home = prop_oneof![
        Just(Home::Nowhere),
        Just(Home::NotConfigured("a".into())),
        Just(Home::Configured("a".into()))
    ];
    (
        (any::<bool>(), any::<bool>(), any::<bool>()),
        (any::<bool>(), any::<bool>(), any::<bool>()),
        recorded,
        prop::option::of(Just(id())),
        wish,
        home,
        any_sight(),
    )
        .prop_map(
            |(a, b, recorded, provider_id, wish, home, sight)| Observed {
                deleting: a.0,
                finalizer: a.1,
                skip_cleanup: a.2,
                held: b.0,
                delete_accepted: b.1,
                create_delayed: b.2,
                recorded,
                provider_id,
                wish,
                // There is nobody to ask otherwise.
                sight: if matches!(home, Home::Configured(_)) {
                    sight
                } else {
                    Sight::NotAsked
                },
                home,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    /// The two rules of the module, in every situation that can be described.
    #[test]
    fn nothing_is_created_moved_or_released_without_proof(o in any_observed()) {
        let unseen = !matches!(o.sight, Sight::Here { .. } | Sight::Failed(_));
        match plan(&o) {
            Decision::Act(Action::Create) => {
                prop_assert!(!o.deleting && o.finalizer && !o.held && !o.create_delayed);
                prop_assert_eq!(&o.recorded, &Some(rec("h1", "a")));
                prop_assert!(o.provider_id.is_none() && unseen);
            }
            Decision::Act(Action::Record(new)) => {
                prop_assert!(!o.deleting);
                if let Some(old) = &o.recorded && *old != new {
                    prop_assert!(o.provider_id.is_none() && o.sight == Sight::Absent);
                }
            }
            Decision::Act(Action::Forget) => prop_assert!(unseen && o.provider_id.is_some()),
            Decision::Act(Action::Delete { blind, why, .. }) => {
                let seen = matches!(o.sight, Sight::Here { .. });
                prop_assert!(blind || seen);
                prop_assert!(!blind || o.deleting);
                prop_assert_eq!(why == Why::ProxyDeleted, o.deleting);
            }
            Decision::Act(Action::Release { abandoned }) => {
                prop_assert!(o.deleting && o.finalizer);
                prop_assert_eq!(abandoned, o.skip_cleanup);
                prop_assert!(abandoned || unseen);
                if !abandoned && (o.recorded.is_some() || o.provider_id.is_some()) {
                    prop_assert!(
                        o.sight == Sight::Absent || o.home == Home::Nowhere,
                        "nobody said that nothing is left"
                    );
                }
            }
            Decision::Rest(_) => {}
        }
    }
}
