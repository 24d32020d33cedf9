/* Whether samples are cheaper next to their neighbours, or where they were made before.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Many datasets cache what they opened last (a row group, a shard, a decompressed volume),
 *   or everything they have decoded. There a sample costs less in the worker that made its
 *   neighbour, or that made it in the last epoch, than in another one. This policy detects
 *   that in the costs that workers report, and says to what extent neighbours should be
 *   kept together. Once measurements show no gain, they no longer are.
 *
 * Terms
 *   follower   a sample whose worker had just made the one before it in the sampler's order
 *   first      any other. A worker's very first sample counts as neither: it pays for imports
 *              and for pages that were never touched.
 *   group      samples that share what is opened for them: a run of the sampler's order
 *   opening    what the first sample of a group costs beyond the others
 *   home       the worker that made a sample last
 *
 * The contrast: are samples of one kind more expensive ("dear") than those of another ("cheap")?
 *   The last samples of the cheap kind are kept. Each sample of the dear kind gets its rank
 *   among them, from 0 to 1. If the kinds do not differ, ranks are uniform and their mean is
 *   1/2, whatever the distribution looks like. A heavy tail or two classes of cost deceive
 *   it no more than others (the rank-sum test of Mann, Whitney and Wilcoxon). A machine that slows
 *   down slows both kinds. The mean is believed when it lies at least CONTRAST_LEAST above 1/2, and
 *   CONTRAST_SIGMAS standard deviations of the mean of as many uniform ranks. That is a statement
 *   about the sign. The saving per sample must be worth acting on as well. It is the dear kind's
 *   median beyond the cheap kind's lower quartile (in groups of two, half of the cheap kind open a
 *   group, too). That must be at least a quarter of the cheap kind's cost and LOCALITY_WORTH_NS,
 *   which is half of what tasks are chunked to. A chunk amortises less than that already.
 *
 *   Where groups are much longer than what one worker makes of them at a time, most of the dear
 *   kind find their group open. Only few pay, but a lot: ranks and medians do not show it.
 *   So a second statement counts as well. Costs beyond CONTRAST_FAR times the cheap kind's lower
 *   quartile must be commoner in the dear kind. The difference of the two shares must be
 *   CONTRAST_SIGMAS of its standard deviations. Their extra cost must be worth it on average.
 *
 *   unknown  until EVIDENCE samples of both kinds were seen. Four times as many in total, where
 *            some cost far more than usual and nothing was believed. Where samples cost less than
 *            LOCALITY_WORTH_NS, CONTRAST_FEW of the dear kind are enough. So are CONTRAST_MANY of
 *            both, of which at most one in as many costs far more.
 *   yes      believed, until the mean rank or the difference falls to half of what was required
 *   no       in all other cases. It can become yes at any time. But where nothing is kept
 *            together, each worker opens each group, few of either kind pay, and detection
 *            takes long. So the answer is unknown again when an order that keeps near indices
 *            together follows one that did not.
 *   The policy arranges nothing to learn about homes. Of W workers one in W samples is made at home
 *   by chance. A few of these are enough to see that they are much cheaper there.
 *
 * Groups
 *   While neighbours are kept together, a follower may cost more than halfway from the cheap
 *   followers to the firsts. It has then opened a group of its own. Each index remembers whether it
 *   followed, and whether it opened a group even so. Where such a sample follows, its group begins,
 *   and that is the place to change workers. A sampler that shuffles inside of
 *   groups makes these marks wrong. Their accuracy is counted on the followers that were kept in
 *   spite of their mark (one in eight). They are believed while most are right. If most indices of
 *   the order do not come right after the one before them, it probably shuffles. Then marks are not
 *   believed before MN_LOCALITY_RIGHT more were right than wrong: until then all followers are
 *   kept.
 *
 * Chains
 *   A chain is a run of the sampler's order that one worker is meant to make.
 *   mn_locality_breaks says whether a new one begins at a sample. It does at a group's
 *   declared or remembered beginning. Else it does not inside of a batch. At the beginning of a
 *   batch (where torch would change workers) it does, with two exceptions. The sample is known to
 *   follow, or most samples that followed there opened nothing. To learn that, some follow there in
 *   any case. It is one in four until EDGES were seen, one in sixteen from then on, and never two
 *   in a row. No chain is longer than `most` samples: with longer ones there would not be one for
 *   each worker within what may be planned. The caller waits for the first batch of an epoch: while
 *   nothing is known of it, all workers share it (mark_borders() in mn_plan.c).
 */
#ifndef MN_POLICY_LOCALITY_H
#define MN_POLICY_LOCALITY_H

#include <stdbool.h>
#include <stdint.h>

#define MN_CONTRAST_MEMORY 64
#define MN_CONTRAST_SIGMAS 4.0
#define MN_CONTRAST_LEAST 0.15
#define MN_CONTRAST_EVIDENCE 40
#define MN_CONTRAST_FEW 8 /* of the dear kind, where they cost next to nothing, */
#define MN_CONTRAST_MANY 1024 /* or of both */
#define MN_CONTRAST_FAR 4.0
#define MN_CONTRAST_FAR_LEAST 8 /* samples that cost far more */
#define MN_LOCALITY_WORTH_NS 150000
/* Memory, in samples, of the length of groups and of beginnings of batches: older ones weigh less
 * and less. */
#define MN_LOCALITY_MEMORY 1024
#define MN_LOCALITY_EDGES 4
#define MN_LOCALITY_RIGHT 3
#define MN_LOCALITY_PAIRS 16 /* pairs of neighbours in the order that count; also the most per
                              * batch */

/* What is known of an index. */
enum mn_cost_mark {
    MN_COST_FOLLOWED = 1u << 0, /* one worker made it right after its neighbour */
    MN_COST_OPENS = 1u << 1,    /* and it was expensive even so: it opens a group */
    MN_COST_ABROAD = 1u << 2,   /* its known cost was not measured at its home */
    MN_COST_APART = 1u << 3,    /* nor after its neighbour, before groups were known */
    MN_COST_EARLY = 1u << 4,    /* measured after it, before groups were known */
};

enum mn_contrast_answer {
    MN_CONTRAST_UNKNOWN = 0,
    MN_CONTRAST_NO = 1,
    MN_CONTRAST_YES = 2,
};

/* How many samples of a kind there were, and how many of them cost far more than usual. */
struct mn_contrast_tail {
    double n, far; /* with the memory above */
};

struct mn_contrast {
    float cheap[MN_CONTRAST_MEMORY]; /* ring of the last costs of the cheap kind */
    float dear[MN_CONTRAST_MEMORY];  /* the same for the dear kind */
    uint32_t cheap_at, dear_at;      /* their next places */
    double rank;            /* mean rank of the dear kind among the cheap */
    double dear_ns, cheap_ns; /* median, and lower quartile: a pause of the machine that hits one
                               * sample makes neither kind dear */
    uint32_t ndear, ncheap;    /* up to MN_CONTRAST_MEMORY */
    struct mn_contrast_tail cheap_tail, dear_tail;
    double far_ns;             /* mean cost of those of the dear kind that cost far more */
    double paid_ns;            /* what one of the dear kind costs where it is dear */
    enum mn_contrast_answer answer;
};

/* Whether an order keeps near indices together. Then, of its pairs of neighbours most lie within an
 * eighth of the dataset. In a random order a quarter do. */
struct mn_locality_order {
    double share; /* share of such pairs among the last ones */
    double next;  /* share of pairs of an index and the next index */
    bool near;    /* the order keeps near indices together */
};

struct mn_locality {
    struct mn_contrast near; /* firsts against followers */
    struct mn_contrast home; /* made elsewhere against made at home again */
    double each_ns;            /* mean cost of followers that open nothing */
    double followers, opened, firsts; /* counts, with the memory above: followers, those that
                                       * opened, firsts; */
    double edges, edges_opened;       /* followers at the edge of a batch, those of them that
                                       * opened */
    bool joins;                       /* most followers at an edge opened nothing */
    struct mn_locality_order order;
    double right, wrong;       /* marks of followers that were kept in spite of them */
};

/* Input for planning one sample of the order. */
struct mn_locality_place {
    bool declared;   /* the dataset says where groups begin */
    bool begins;     /* and one begins here */
    bool batch;      /* it is the first of its batch */
    uint8_t marks;   /* enum mn_cost_mark of its index; 0: nothing is known */
    uint64_t number; /* in the sampler's order, for the one in eight */
    int64_t length;  /* of the chain so far */
    int64_t rows;    /* of its batch */
    int64_t most;    /* samples that a chain may have */
};

void
mn_locality_init(struct mn_locality *l);

/* Learns from the sampler's order: n indices of a dataset of that length, one after the other. */
void
mn_locality_drawn(struct mn_locality *l, const int64_t *index, int64_t n, int64_t length);

/* Learns a sample's cost and how it was made. edge: it is the first of its batch. Returns the new
 * marks of its index. */
uint8_t
mn_locality_observe_near(struct mn_locality *l, bool follows, bool edge, uint8_t marks,
                         int64_t cost_ns);

/* Learns what a sample that was made before cost at its home or elsewhere. */
void
mn_locality_observe_home(struct mn_locality *l, bool home, int64_t cost_ns);

/* Returns whether a follower with this cost has opened a group, provided that neighbours are
 * cheaper at all. */
bool
mn_locality_opens(const struct mn_locality *l, int64_t cost_ns);

/* Returns whether a new chain begins at this sample. */
bool
mn_locality_breaks(const struct mn_locality *l, const struct mn_locality_place *p);

/* Returns whether the marks of where groups begin are believed. */
bool
mn_locality_believes(const struct mn_locality *l);

/* Returns whether groups continue from batch to batch, by what is known. */
bool
mn_locality_joins(const struct mn_locality *l);

/* Returns the mean length of a group in samples; 1 where neighbours are not cheaper. */
double
mn_locality_length(const struct mn_locality *l);

/* Returns what it costs to make a sample away from its group; 0: nothing, or not known. */
int64_t
mn_locality_opening(const struct mn_locality *l);

/* Returns what a sample that cost this much as a first costs as a follower. */
int64_t
mn_locality_beside(const struct mn_locality *l, int64_t cost_ns);

/* Returns what a sample that cost this much elsewhere costs at its home. */
int64_t
mn_locality_at_home(const struct mn_locality *l, int64_t cost_ns);

/* Returns what it costs to make a sample away from its home; 0: nothing, or not known. */
int64_t
mn_locality_away(const struct mn_locality *l);

#endif
