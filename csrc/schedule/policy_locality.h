/* Whether samples are cheaper beside their neighbours, or where they were made before.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Many datasets keep what they opened last (a row group, a shard, a decompressed volume),
 *   or all that they have decoded. There a sample costs less in the worker that made its
 *   neighbour, or that made it in the last epoch, than in another one. This policy finds that
 *   out from the costs that workers report, and says how far neighbours are to be kept
 *   together. Nothing is assumed: what is not measured to be cheaper is not arranged for.
 *
 * Terms
 *   follower   a sample whose worker had just made the one before it in the sampler's order
 *   first      any other. A worker's very first sample counts as neither: it pays for imports
 *              and for pages that nobody has touched.
 *   group      samples that share what is opened for them: a run of the sampler's order
 *   opening    what the first sample of a group costs beyond the others
 *   home       the worker that made a sample last
 *
 * The contrast: are samples of one kind dearer than those of another?
 *   The last samples of the cheap kind are kept. Of each sample of the dear kind the rank among
 *   them is taken, from 0 to 1. Where the kinds do not differ ranks are uniform and their mean
 *   is 1/2, whatever the distribution looks like: a heavy tail or two classes of cost deceive
 *   it no more than others (the rank-sum test of Mann, Whitney and Wilcoxon), and a machine
 *   that slows down slows both kinds. The mean is believed when it lies CONTRAST_SIGMAS
 *   standard deviations of the mean of as many uniform ranks, and at least
 *   CONTRAST_LEAST, above 1/2. That is a statement about the sign;
 *   what a sample saves, the dear kind's median beyond the cheap kind's lower quartile (in groups
 *   of two half of these open one, too), has to be worth acting on as well:
 *   a quarter of the cheap kind's cost and LOCALITY_WORTH_NS, which is half of what tasks are
 *   chunked to: less than that is amortised by the chunk already.
 *
 *   Where groups are much longer than what one worker makes of them at a time, most of the dear
 *   kind find their group open and only few pay, but those much: ranks and medians do not show
 *   it. So a second statement counts as well: that costs beyond CONTRAST_FAR times the cheap
 *   kind's lower quartile are commoner in the dear kind, by CONTRAST_SIGMAS standard deviations of
 *   that difference of two shares, and that what they cost more is worth it on average.
 *
 *   unknown  until EVIDENCE samples of both kinds were seen, and four times as many in all where
 *            some cost far more than usual, and nothing was believed. Where samples cost less
 *            than LOCALITY_WORTH_NS, CONTRAST_FEW of the dear kind are enough, or CONTRAST_MANY
 *            of both, of which no more than one in as many cost far more.
 *   yes      believed; until the mean rank or the difference falls to half of what was asked
 *   no       all else. It can become yes at any time. But where nothing is kept together each
 *            worker opens each group, few of either kind pay, and it takes long to see it: so
 *            the answer is unknown again when an order that keeps near indices together
 *            follows one that did not.
 *   Nothing is arranged to learn of homes: of W workers one in W samples is made at home by
 *   chance, and a few of these are enough to see that they are much cheaper there.
 *
 * Groups
 *   While neighbours are kept together, a follower that costs more than halfway from the
 *   cheap followers to the firsts has opened a group of its own. Each index remembers whether it
 *   followed, and opened even so (policy_cost.h): where such a sample follows, its group begins,
 *   and that is the place to change workers. A sampler that shuffles inside of groups makes these
 *   marks wrong; how often they were right is counted on the followers that were kept in spite of
 *   their mark (one in eight), and they are believed while most are. Where most indices of the
 *   order do not come right after the one before them it is likely that it shuffles, and marks
 *   are not believed before MN_LOCALITY_RIGHT more were right than wrong: until then all are
 *   kept.
 *
 * Chains
 *   A chain is a run of the sampler's order that one worker is meant to make.
 *   mn_locality_breaks says whether a new one begins at a sample: at a group's declared or
 *   remembered beginning; else not inside of a batch; and at the beginning of a batch (where
 *   torch would change workers) unless the sample is known to follow, or most that followed there
 *   opened nothing. To know that, some follow there in any case: one in four until EDGES were
 *   seen, one in sixteen from then on, and never two in a row. No chain is longer than `most`
 *   samples: with longer ones there would not be one for each worker within what may be planned.
 *
 * The first batch of all
 *   Nothing is known, and everybody waits for it. If it is a group, spreading it over W workers
 *   costs W - 1 openings; if not, leaving it to one takes W times as long. So each worker begins
 *   a batch of its own, and once the second samples of most of those are nearly as dear as
 *   the first ones (half as dear, so that opening again costs no more than a sample) all help
 *   with it. By then the B samples of the batch are two fewer for the price of two: they are
 *   ready after 2 + (B - 2) / W samples' time instead of B / W. Where that is too much
 *   (mn_locality_finds) the batch is spread at once.
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
#define MN_CONTRAST_FAR_LEAST 8 /* of them */
#define MN_LOCALITY_WORTH_NS 150000
/* Of samples, for the length of groups, and of beginnings of batches: older ones weigh less
 * and less. */
#define MN_LOCALITY_MEMORY 1024
#define MN_LOCALITY_EDGES 4
#define MN_LOCALITY_RIGHT 3
#define MN_LOCALITY_PAIRS 16 /* of neighbours in the order that count, and of each batch at most */
/* The first batch of all takes at most this much longer, in tenths, because it is found out whether
 * it is a group. */
#define MN_LOCALITY_FIND_TENTHS 3

enum mn_contrast_answer {
    MN_CONTRAST_UNKNOWN = 0,
    MN_CONTRAST_NO = 1,
    MN_CONTRAST_YES = 2,
};

/* How many of a kind there were, and of them how many cost far more than usual. */
struct mn_contrast_tail {
    double n, far; /* with the memory above */
};

struct mn_contrast {
    float cheap[MN_CONTRAST_MEMORY]; /* the last costs of the cheap kind, a ring, */
    float dear[MN_CONTRAST_MEMORY];  /* and of the dear kind */
    uint32_t cheap_at, dear_at;      /* their next places */
    double rank;            /* mean rank of the dear kind among them */
    double dear_ns, cheap_ns; /* their median, and lower quartile: a pause of the machine that hits
                               * one of them makes neither kind dear */
    uint32_t ndear, ncheap;    /* up to MN_CONTRAST_MEMORY */
    struct mn_contrast_tail cheap_tail, dear_tail;
    double far_ns;             /* mean cost of those of the dear kind that cost far more */
    double paid_ns;            /* what one of the dear kind costs where it is dear */
    enum mn_contrast_answer answer;
};

/* Whether an order keeps indices together that are near to each other: of pairs of neighbours in it
 * most lie within an eighth of the dataset. In a random order a quarter do. */
struct mn_locality_order {
    double share; /* of such pairs, of some of the last, */
    double next;  /* and of those that are an index and the one after it */
    bool keeps;
};

struct mn_locality {
    struct mn_contrast near; /* firsts against followers */
    struct mn_contrast home; /* made elsewhere against made at home again */
    double each_ns;            /* of followers that open nothing */
    double followers, opened, firsts; /* counts, with the memory above: followers, of them */
    double edges, edges_opened;       /* those that opened; those at the edge of a batch */
    bool joins;                       /* most of the latter opened nothing */
    struct mn_locality_order order;
    double right, wrong;       /* marks of followers that were kept in spite of them */
};

/* What is known of one sample of the order when it is planned. */
struct mn_locality_place {
    bool declared;   /* the dataset says where groups begin, */
    bool begins;     /* and one does here */
    bool batch;      /* it is the first of its batch */
    uint8_t marks;   /* enum mn_cost_mark of its index; 0: nothing is known */
    uint64_t number; /* in the sampler's order, for the one in eight */
    int64_t length;  /* of the chain so far */
    int64_t rows;    /* of its batch */
    int64_t most;    /* samples that a chain may have */
};

void
mn_locality_init(struct mn_locality *l);

/* What the sampler draws, of a dataset of that length: n of it, one after the other. */
void
mn_locality_drawn(struct mn_locality *l, const int64_t *index, int64_t n, int64_t length);

/* A sample's cost, and how it was made; edge: it is the first of its batch. Returns the marks
 * of its index from now on. */
uint8_t
mn_locality_observe_near(struct mn_locality *l, bool follows, bool edge, uint8_t marks,
                         int64_t cost_ns);

/* A sample that was made before cost this much at its home, or elsewhere. */
void
mn_locality_observe_home(struct mn_locality *l, bool home, int64_t cost_ns);

/* Whether a sample that has followed and cost so much has opened a group: if neighbours are
 * cheaper at all. */
bool
mn_locality_opens(const struct mn_locality *l, int64_t cost_ns);

/* Whether a new chain begins at this sample. */
bool
mn_locality_breaks(const struct mn_locality *l, const struct mn_locality_place *p);

/* Whether what indices remember of where groups begin is believed. */
bool
mn_locality_believes(const struct mn_locality *l);

/* Whether groups go on from batch to batch, as far as it is known. */
bool
mn_locality_joins(const struct mn_locality *l);

/* Whether a first batch of so many rows is left to one worker until it is known whether it is a
 * group. */
bool
mn_locality_finds(int64_t rows, int64_t workers);

/* What the first two samples of batches have cost whose workers began with them. */
struct mn_locality_pairs {
    uint32_t alike, opened; /* batches where the second was as dear, or not */
};

void
mn_locality_pair(struct mn_locality_pairs *s, int64_t first_ns, int64_t second_ns);

/* Whether they say that the first batch is no group. */
bool
mn_locality_spreads(const struct mn_locality_pairs *s);

/* Samples of a group, on average; 1 where neighbours are not cheaper. */
double
mn_locality_length(const struct mn_locality *l);

/* What it costs to make a sample away from its group; 0: nothing, or not known. */
int64_t
mn_locality_opening(const struct mn_locality *l);

/* What a sample costs beside its neighbour that has cost so much as a first. */
int64_t
mn_locality_beside(const struct mn_locality *l, int64_t cost_ns);

/* What a sample costs at its home that has cost so much elsewhere. */
int64_t
mn_locality_at_home(const struct mn_locality *l, int64_t cost_ns);

/* What it costs to make a sample away from its home; 0: nothing, or not known. */
int64_t
mn_locality_away(const struct mn_locality *l);

#endif /* MN_POLICY_LOCALITY_H */
